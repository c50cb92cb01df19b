// The page: reads the input, shows the answer as it grows. The model runs in worker.js.

const at = (id) => document.getElementById(id);

const site = await (await required("site.json")).json();
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
  // A button that is disabled or hidden would lose the focus.
  const focused = [at("go"), at("stop")].includes(document.activeElement);
  at("status").textContent = status;
  running = busy;
  at("go").disabled = busy;
  at("stop").hidden = !busy;
  if (focused) at(busy ? "stop" : "go").focus();
  document.body.dataset.state = busy ? "running" : "ready";
}

const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

/** Fetches a file of the site; ends with its name where it is missing. */
async function required(name, options) {
  const response = await fetch(name, options).catch((error) => ({ status: error.message }));
  if (response.ok) return response;
  at("progress").hidden = true;
  at("status").textContent = `${name} cannot be loaded (${response.status}): copy the whole site again`;
  throw new Error(at("status").textContent);
}

/** Names the file that is missing; browsers do not tell which module or WASM it was. */
async function cannotLoad(message) {
  at("progress").hidden = true;
  at("status").textContent = message;
  for (const name of site.files) await required(name, { method: "HEAD" });
}

worker.onerror = ({ message }) => cannotLoad(`The model cannot be loaded: ${message ?? "a module is missing"}`);
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
  if (data.lines) at("output").replaceChildren(...data.lines.flatMap(drawn));
  if (data.done) show(data.done, false);
  if (data.failed && data.fatal) cannotLoad(data.failed);
  else if (data.failed) show(data.failed, false);
};

/** Returns a line of an answer, after a bar where it has a share. */
function drawn([text, share], place, { length }) {
  const line = place < length - 1 ? `${text}\n` : text;
  if (!(share >= 0 && share <= 1)) return [line];
  const bar = document.createElement("meter");
  bar.value = share;
  bar.ariaHidden = "true"; // the line has the number
  return [bar, line];
}

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
