// The page: reads the input, shows the answer as it grows. The model runs in worker.js.

const at = (id) => document.getElementById(id);

const site = await (await fetch("site.json")).json();
const worker = new Worker("worker.js", { type: "module" });
let running = false;

at("title").textContent = document.title = site.title;
at("about").textContent = site.about;
at("input-label").textContent = site.input;
at("go").textContent = site.button;
at("input").placeholder = site.placeholder;
for (const line of site.standing) {
  const paragraph = document.createElement("p");
  paragraph.textContent = line;
  at("standing").append(paragraph);
}

function show(status, busy = running) {
  at("status").textContent = status;
  running = busy;
  at("go").disabled = busy;
  at("stop").hidden = !busy;
  document.body.dataset.state = busy ? "running" : "ready";
}

const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

worker.onerror = () => {
  at("status").textContent = "The model cannot be loaded in this browser.";
};
worker.onmessage = ({ data }) => {
  if (data.read !== undefined) {
    at("progress").value = data.read / data.all;
    at("status").textContent = `Loading ${megabytes(data.read)} of ${megabytes(data.all)} MB`;
  }
  if (data.ready) {
    at("progress").hidden = true;
    show(`Ready, computing with ${data.ready}`, false);
  }
  if (data.text !== undefined) at("output").textContent = data.text;
  if (data.done) show(data.done, false);
  if (data.failed) {
    at("progress").hidden = true;
    show(data.failed, false);
    at("go").disabled = data.fatal ?? false;
  }
};

function run(event) {
  event?.preventDefault();
  if (running || at("go").disabled) return;
  at("output").textContent = "";
  show("Running", true);
  worker.postMessage({ run: at("input").value });
}
at("form").addEventListener("submit", run);
at("stop").addEventListener("click", () => worker.postMessage({ stop: true }));
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event);
});

// The service worker keeps every file, so that the page works without a network.
if ("serviceWorker" in navigator) {
  navigator.serviceWorker.register("service-worker.js").catch(() => {
    at("standing").append("This browser keeps no copy: the page needs the network the next time.");
  });
}
