# SPDX-License-Identifier: Apache-2.0
"""The files of JSON: their envelope, the manifest, and values of Python in them."""
