/* SPDX-License-Identifier: Apache-2.0
   Search without a server: browsers start no worker from a file, so its script runs in a frame. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      this.ready = new Promise((done) => (this.done = done));
      frame.srcdoc = "<!doctype html><title>search</title>";
      frame.onload = () => {
        this.inside = frame.contentWindow;
        this.inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          this.onmessage?.(event);
        };
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = this.done;
        frame.contentDocument.body.append(script);
      };
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
/* Code that scrolls can be reached by keys; the theme says so only after a window has changed. */
addEventListener("load", () =>
  setTimeout(() => {
    for (const code of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
      if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
  }, 300),
);
