// Keeps every file of the site, so that it works without a network after the first load.

const CACHE = "transferry-VERSION";
const FILES = ["FILES"];
// Of onnxruntime-web, for browsers with WebGPU.
const GPU_FILES = ["GPU_FILES"];

self.addEventListener("install", (event) => {
  const keep = async () => {
    const cache = await caches.open(CACHE);
    const gpu = GPU_FILES.length ? await navigator.gpu?.requestAdapter().catch(() => null) : null;
    for (const file of gpu ? [...FILES, ...GPU_FILES] : FILES) {
      // One by one: a model of gigabytes and its copies would not fit into memory together.
      await cache.add(new Request(file, { cache: "no-cache" }));
    }
    await self.skipWaiting();
  };
  event.waitUntil(keep());
});

self.addEventListener("activate", (event) => {
  const clean = async () => {
    const scope = "transferry-";
    for (const name of await caches.keys()) {
      if (name.startsWith(scope) && name !== CACHE) await caches.delete(name);
    }
    await self.clients.claim();
  };
  event.waitUntil(clean());
});

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  const answer = async () => {
    const kept = await caches.match(event.request, { cacheName: CACHE, ignoreSearch: true });
    return kept ?? fetch(event.request);
  };
  event.respondWith(answer());
});
