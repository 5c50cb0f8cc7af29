// The search runs in a worker, which browsers refuse where a page is read from a file. There its script runs in a hidden
// frame instead, and messages go to and fro as a worker's would.
if (window.location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${script.src} cannot be read`));
        inside.document.body.append(script);
      });
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
