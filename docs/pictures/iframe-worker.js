/* Browsers start no worker on a page that is read as a file, and the search box needs one: here it runs in a
   hidden frame instead. The offline plugin of the theme loads a script of this name, from elsewhere if there is none. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, page = inside.document;
      page.open();
      page.write("<!doctype html><body>");
      page.close();
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      script.src = url;
      this.started = new Promise(done => { script.onload = done; });
      page.body.append(script);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.started.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
