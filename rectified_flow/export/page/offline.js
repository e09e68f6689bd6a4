// A service worker that keeps the page for visits without a network. export.py writes two constants above this line: VERSION, a
// hash of all files of the page, and FILES, the names of those that it reads. The address has the backend, whose runtime is kept.

const CACHE = `${registration.scope} ${VERSION}`;
const UNUSED = { wasm: /webgpu|asyncify/, webgpu: /ort\.wasm|threaded\.wasm/ }[new URL(location).searchParams.get("backend")];

addEventListener("install", (event) => {
  skipWaiting();
  event.waitUntil(keep(["./", ...FILES].filter((name) => !UNUSED?.test(name))));
});
addEventListener("activate", (event) => event.waitUntil(Promise.all([clients.claim(), removeOldVersions()])));
addEventListener("fetch", (event) => {
  if (event.request.method !== "GET" || !event.request.url.startsWith(registration.scope)) return;
  event.respondWith(fetch(event.request).catch(() => kept(event.request))); // with a network, the page is that of the host
});

/** Fetch all files; the host is asked whether those that the browser has are still the same. */
async function keep(names) {
  const cache = await caches.open(CACHE);
  await cache.addAll(names.map((name) => new Request(name, { cache: "no-cache" })));
}

async function kept(request) {
  const cache = await caches.open(CACHE);
  return (await cache.match(request, { ignoreSearch: true, ignoreVary: true })) ?? Response.error();
}

async function removeOldVersions() {
  const names = await caches.keys();
  const old = names.filter((name) => name.startsWith(`${registration.scope} `) && name !== CACHE);
  await Promise.all(old.map((name) => caches.delete(name)));
}
