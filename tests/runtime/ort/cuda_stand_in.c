/* A CUDA driver, runtime and cuBLAS without a GPU: device memory is host memory, copies copy, and
   kernels and products do nothing. simulated_gpu.py compiles it and adds the functions that only
   have to succeed. Layouts and numbers are those of CUDA 13's headers.

   What is asynchronous is as late as CUDA allows: a copy on a stream happens when somebody waits,
   and page-locked memory that it will write holds 0xAB until then. */

#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { LAUNCHES, PRODUCTS, TO_DEVICE, TO_HOST, WITHIN, SYNCS, MALLOCS, HELD, MOST, PINNED, TORN, STRAYS, COUNTS };
enum { OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 1 };
static long counts[COUNTS], limit, failing;
static int driver = 13000, devices = 1, one;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Called by the tests. `nth`: the first allocation from now that fails, with all after it; 0: none. */
void simulated_counts(long *out) { memcpy(out, counts, sizeof counts); }
void simulated_setting(long bytes, long nth, int version, int count) {
  limit = bytes; failing = nth; driver = version; devices = count;
}
void simulated_count(int what) { __atomic_add_fetch(&counts[what], 1, __ATOMIC_RELAXED); }

static int take(void **out, size_t size) {
  *out = NULL;
  pthread_mutex_lock(&lock);
  counts[MALLOCS]++;
  int full = failing && --failing == 0;
  failing += full;
  full |= limit && counts[HELD] + (long)size > limit;
  if (!full && (*out = aligned_alloc(256, (size + 511) / 256 * 256))) {
    memset(*out, 0, size);
    counts[HELD] += malloc_usable_size(*out);
    if (counts[HELD] > counts[MOST]) counts[MOST] = counts[HELD];
  }
  pthread_mutex_unlock(&lock);
  return *out ? 0 : OUT_OF_MEMORY;
}
static int give(void *memory) {
  pthread_mutex_lock(&lock);
  if (memory) counts[HELD] -= malloc_usable_size(memory);
  pthread_mutex_unlock(&lock);
  free(memory);
  return 0;
}

/* Queued copies. TORN: a source in page-locked memory changed before its copy was made. STRAYS: work
   on a stream while another one had work that nobody had waited for. */
enum { LOCKED = 4096, QUEUED = 65536 };
static struct { char *begin; size_t size; } locked[LOCKED];
static struct { char *to; const char *from; char *value; size_t size; } queue[QUEUED];
static int queued;
static void *busy;
static pthread_mutex_t queueing = PTHREAD_MUTEX_INITIALIZER;

static int is_locked(const void *memory) {
  for (int i = 0; i < LOCKED; i++)
    if ((size_t)((const char *)memory - locked[i].begin) < locked[i].size) return 1;
  return 0;
}
static void finish(void) {
  for (int i = 0; i < queued; i++) {
    if (queue[i].value) {
      if (queue[i].from && memcmp(queue[i].from, queue[i].value, queue[i].size)) counts[TORN]++;
      memcpy(queue[i].to, queue[i].value, queue[i].size);
      free(queue[i].value);
    } else memmove(queue[i].to, queue[i].from, queue[i].size);
  }
  queued = 0;
  busy = NULL;
}
static int wait_for_all(void) {
  pthread_mutex_lock(&queueing);
  finish();
  pthread_mutex_unlock(&queueing);
  return 0;
}
static void use(void *stream) {
  if (busy && stream && stream != busy) simulated_count(STRAYS);
  if (stream) busy = stream;
}
static int launch(void *stream) {
  pthread_mutex_lock(&queueing);
  use(stream);
  pthread_mutex_unlock(&queueing);
  simulated_count(LAUNCHES);
  return 0;
}
static int copy(void *to, const void *from, size_t size, int kind, void *stream, int now) {
  if (kind >= 1 && kind <= 3) simulated_count(TO_DEVICE + kind - 1);
  pthread_mutex_lock(&queueing);
  if (now || (kind == 2 && !is_locked(to)) || queued == QUEUED) {
    finish();
    memmove(to, from, size);
  } else {
    use(stream);
    queue[queued].to = to;
    queue[queued].from = kind == 1 && !is_locked(from) ? NULL : from;
    queue[queued].value = kind == 1 ? memcpy(malloc(size + 1), from, size) : NULL;
    queue[queued++].size = size;
    if (kind == 2) memset(to, 0xAB, size);
  }
  pthread_mutex_unlock(&queueing);
  return 0;
}

int cuInit(unsigned flags) { return devices ? 0 : NO_DEVICE; }
int cuDriverGetVersion(int *out) { *out = driver; return 0; }
int cuDeviceGetCount(int *out) { *out = devices; return 0; }
int cuDeviceGet(int *out, int device) { *out = device; return 0; }
int cuDeviceGetName(char *out, int size, int device) { strcpy(out, "stand-in"); return 0; }
int cuDeviceGetAttribute(int *out, int which, int device) {
  *out = which == 75 ? 9 : which == 76 ? 0 : 1; /* compute capability 9.0 */
  return 0;
}

int cudaGetDeviceCount(int *out) { *out = devices; return devices ? 0 : NO_DEVICE; }
int cudaGetDevice(int *out) { *out = 0; return 0; }
int cudaDriverGetVersion(int *out) { *out = driver; return 0; }
int cudaRuntimeGetVersion(int *out) { *out = 13000; return 0; }
int cudaDeviceGetAttribute(int *out, int which, int device) {
  static const int found[][2] = {{75, 9}, {76, 0}, {16, 132}, {1, 1024}, {8, 49152},
    {10, 32}, {39, 2048}, {81, 233472}, {97, 232448}};
  *out = 1;
  for (size_t i = 0; i < sizeof found / sizeof *found; i++)
    if (found[i][0] == which) *out = found[i][1];
  return 0;
}
int cudaGetDeviceProperties(void *out, int device) {
  static const struct { int place, value; } found[] = {{304, 65536}, {308, 32}, {320, 1024},
    {324, 1024}, {328, 1024}, {332, 64}, {336, 0x7fffffff}, {340, 65535}, {344, 65535}, {360, 9},
    {384, 132}, {596, 50 << 20}, {604, 2048}, {632, 65536}, {720, 1}};
  static const struct { int place; size_t value; } large[] = {{288, 8ul << 30}, {296, 49152},
    {624, 233472}, {672, 232448}};
  memset(out, 0, 1008);
  strcpy(out, "stand-in");
  for (size_t i = 0; i < sizeof found / sizeof *found; i++)
    memcpy((char *)out + found[i].place, &found[i].value, sizeof found[i].value);
  for (size_t i = 0; i < sizeof large / sizeof *large; i++)
    memcpy((char *)out + large[i].place, &large[i].value, sizeof large[i].value);
  return 0;
}

int cudaMalloc(void **out, size_t size) { return take(out, size); }
int cudaMallocFromPoolAsync(void **out, size_t size, void *pool, void *stream) { return take(out, size); }
int cudaFree(void *memory) { wait_for_all(); return give(memory); }
int cudaFreeAsync(void *memory, void *stream) { return cudaFree(memory); }
int cudaMallocHost(void **out, size_t size) {
  if (take(out, size)) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  counts[MALLOCS]--;
  counts[HELD] -= malloc_usable_size(*out);
  counts[PINNED] += malloc_usable_size(*out);
  int i = 0;
  while (locked[i].size) i++;
  locked[i].begin = *out;
  locked[i].size = size;
  pthread_mutex_unlock(&lock);
  return 0;
}
int cudaHostAlloc(void **out, size_t size, unsigned flags) { return cudaMallocHost(out, size); }
int cudaFreeHost(void *memory) {
  wait_for_all();
  pthread_mutex_lock(&lock);
  for (int i = 0; i < LOCKED; i++)
    if (memory && locked[i].begin == memory) {
      counts[PINNED] -= malloc_usable_size(memory);
      locked[i].size = 0;
    }
  pthread_mutex_unlock(&lock);
  free(memory);
  return 0;
}
int cudaMemGetInfo(size_t *left, size_t *all) { *left = 7ul << 30; *all = 8ul << 30; return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  simulated_count(SYNCS);
  return copy(to, from, size, kind, NULL, 1);
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return copy(to, from, size, kind, stream, 0); }
int cudaMemcpy2DAsync(char *to, size_t pitch, const char *from, size_t step, size_t width, size_t height, int kind, void *stream) {
  copy(to, from, 0, kind, stream, 1);
  for (size_t i = 0; i < height; i++) memmove(to + i * pitch, from + i * step, width);
  return 0;
}
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) { wait_for_all(); memset(to, 0, size); return 0; }
int cudaMemset(void *memory, int value, size_t size) { wait_for_all(); memset(memory, value, size); return 0; }
int cudaMemsetAsync(void *memory, int value, size_t size, void *stream) { return cudaMemset(memory, value, size); }
int cudaPointerGetAttributes(char *out, void *memory) {
  memset(out, 0, 88);
  *(int *)out = 2; /* on the device */
  *(void **)(out + 8) = memory;
  return 0;
}

int cudaStreamCreate(void **out) { *out = malloc(1); return 0; }
int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreate(out); }
int cudaStreamDestroy(void *stream) { free(stream); return 0; }
int cudaStreamIsCapturing(void *stream, int *out) { *out = 0; return 0; }
int cudaStreamSynchronize(void *stream) { simulated_count(SYNCS); return wait_for_all(); }
int cudaDeviceSynchronize(void) { simulated_count(SYNCS); return wait_for_all(); }
int cudaEventSynchronize(void *event) { simulated_count(SYNCS); return wait_for_all(); }
int cudaEventCreate(void **out) { *out = &one; return 0; }
int cudaEventCreateWithFlags(void **out, unsigned flags) { *out = &one; return 0; }
int cudaEventElapsedTime(float *out, void *from, void *to) { *out = 1; return 0; }
int cudaMemPoolCreate(void **out, const void *properties) { *out = &one; return 0; }
int cudaMemPoolGetAttribute(void *pool, int which, size_t *out) { *out = 0; return 0; }

int cudaFuncGetAttributes(char *out, const void *kernel) {
  memset(out, 0, 144);
  *(int *)(out + 24) = 1024;
  *(int *)(out + 32) = *(int *)(out + 36) = 90;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel, int threads, size_t shared, unsigned flags) { *out = 2; return 0; }
struct size { unsigned x, y, z; };
static __thread void *stream_of_launch;
int __cudaPushCallConfiguration(struct size grid, struct size block, size_t shared, void *stream) {
  stream_of_launch = stream;
  return 0;
}
int __cudaPopCallConfiguration(struct size *grid, struct size *block, size_t *shared, void **stream) {
  memset(grid, 0, sizeof *grid);
  memset(block, 0, sizeof *block);
  *shared = 0;
  *stream = stream_of_launch;
  return 0;
}
int cudaLaunchKernel(void *kernel, struct size grid, struct size block, void **given, size_t shared, void *stream) { return launch(stream); }
int __cudaLaunchKernel(void *kernel, struct size grid, struct size block, void **given, size_t shared, void *stream) { return launch(stream); }
int cudaLaunchCooperativeKernel(void *kernel, struct size grid, struct size block, void **given, size_t shared, void *stream) { return launch(stream); }
int cudaLaunchKernelExC(char *configuration) { return launch(*(void **)(configuration + 32)); }
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *given) { wait_for_all(); function(given); return 0; }
void *__cudaRegisterFatBinary(void *code) { static void *handles[8192]; static int next; return &handles[next++ % 8192]; }
int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags, int *status) {
  *out = NULL;
  if (status) *status = NOT_FOUND;
  return 0;
}
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "stand-in"; }
const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "stand-in"; }

const char *cublasGetStatusName(int status) { return "stand-in"; }
const char *cublasGetStatusString(int status) { return "stand-in"; }
int cublasGetMathMode(void *handle, int *out) { *out = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *out, int *found) {
  memset(out, 0, 72);
  *found = 1;
  return 0;
}
