// Keeps every file of the site, so that it works without a network after the first load.

// Pages of one origin have caches of their own.
const SCOPE = `transferry ${self.registration.scope} `;
const CACHE = `${SCOPE}VERSION`;
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
    for (const name of await caches.keys()) {
      if (name !== CACHE && (name.startsWith(SCOPE) || (await isOfEarlierPages(name)))) await caches.delete(name);
    }
    await self.clients.claim();
  };
  event.waitUntil(clean());
});

/** Whether a cache holds this page as versions before these names kept it. */
async function isOfEarlierPages(name) {
  if (!/^transferry-[0-9a-f]{16}$/.test(name)) return false;
  return (await (await caches.open(name)).match(new URL("site.json", self.registration.scope))) !== undefined;
}

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  const answer = async () => {
    const kept = await caches.match(event.request, { cacheName: CACHE, ignoreSearch: true });
    return kept ?? fetch(event.request);
  };
  event.respondWith(answer());
});
