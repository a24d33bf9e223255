// A CUDA client that ends in a given way: leave MODE KERNEL_MS COUNT END [SECONDS]
//
// MODE: device (kernels that write 1 GiB), read (that read it), host (that write pinned host memory), streams (device,
// on four streams), contexts (device, in five contexts), each (device, on each GPU that it sees), graph (device, as one
// CUDA graph), nop (empty kernels); null, over and trap have a fatal error of their own when they get SIGUSR1: a null
// pointer, a write behind their allocation, a trap.
// END: pause (keep the kernels queued and sleep), exit, _exit, abort, segv (end with the kernels queued), exec (become
// sleep), oom (allocate host memory without end), sync_pause (wait for them, then sleep), loop (one kernel after the
// other for SECONDS, then end in order). SECONDS of 0 ends at once.
//
// It prints "init", "queued", "synced", "ending" and "done" as it gets there, and "ERR code name" for a CUDA error.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csignal>
#include <ctime>
#include <unistd.h>
#include <cuda.h>
#include <cuda_runtime.h>

static double now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static void say(const char *word) {
  printf("[%d] t=%.3f %s\n", getpid(), now(), word);
  fflush(stdout);
}

static void check(cudaError_t error, const char *call) {
  if (error == cudaSuccess) return;
  printf("[%d] t=%.3f ERR %d %s at %s\n", getpid(), now(), (int)error, cudaGetErrorName(error), call);
  fflush(stdout);
  _exit(10);
}
#define CHECK(call) check((call), #call)

__global__ void write_memory(volatile int *memory, size_t words, long long cycles) {
  long long start = clock64();
  size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  while (clock64() - start < cycles) {
    memory[i % words] = i;
    i += 7919 * gridDim.x * blockDim.x + 13;
  }
}

__global__ void read_memory(volatile int *memory, size_t words, long long cycles) {
  long long start = clock64();
  size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  int sum = 0;
  while (clock64() - start < cycles) {
    sum += memory[i % words];
    i += 7919 * gridDim.x * blockDim.x + 13;
  }
  if (sum == 123456789) memory[0] = sum;
}

__global__ void nothing() {}
__global__ void illegal_access(int *nowhere) { *nowhere = 1; }
__global__ void overrun(int *memory) {
  for (size_t i = 0;; i += 1 << 20) memory[i] = 1;
}
__global__ void trap() { asm("trap;"); }

int main(int count, char **words) {
  const char *mode = count > 1 ? words[1] : "device";
  double kernel_ms = count > 2 ? atof(words[2]) : 200;
  long kernels = count > 3 ? atol(words[3]) : 100;
  const char *end = count > 4 ? words[4] : "pause";
  double seconds = count > 5 ? atof(words[5]) : 5;
  auto is = [&](const char *name) { return !strcmp(mode, name); };
  auto ends_by = [&](const char *name) { return !strcmp(end, name); };

  CHECK(cudaFree(0));
  say("init");
  if (is("null") || is("over") || is("trap")) {
    int *memory = nullptr, got;
    CHECK(cudaMalloc(&memory, (size_t)64 << 20));
    sigset_t go;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    sigprocmask(SIG_BLOCK, &go, nullptr);
    say("queued");
    sigwait(&go, &got);
    if (is("null")) illegal_access<<<1, 1>>>(nullptr);
    else if (is("over")) overrun<<<1, 1>>>(memory);
    else trap<<<1, 1>>>();
    cudaError_t error = cudaDeviceSynchronize();
    usleep(seconds * 1e6);
    check(error, "cudaDeviceSynchronize()");
    return 0;
  }

  long long cycles = (long long)(kernel_ms * 1.9e6);
  int *memory = nullptr;
  size_t size = (size_t)256 << 20;
  if (is("host")) {
    size = (size_t)64 << 20;
    CHECK(cudaHostAlloc(&memory, size * 4, cudaHostAllocMapped));
  } else if (!is("nop")) {
    CHECK(cudaMalloc(&memory, size * 4));
  }
  cudaStream_t streams[4];
  for (auto &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  auto launch = [&](long number) {
    cudaStream_t stream = is("streams") ? streams[number % 4] : streams[0];
    if (is("nop")) nothing<<<1, 1, 0, stream>>>();
    else if (is("read")) read_memory<<<64, 256, 0, stream>>>(memory, size, cycles);
    else write_memory<<<64, 256, 0, stream>>>(memory, size, cycles);
  };

  if (ends_by("loop")) {
    double start = now();
    for (long number = 0; now() - start < seconds; number++) {
      launch(number);
      CHECK(cudaStreamSynchronize(streams[0]));
    }
    say("done");
    return 0;
  }
  if (is("graph")) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal));
    for (long number = 0; number < kernels; number++) launch(number);
    CHECK(cudaStreamEndCapture(streams[0], &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, streams[0]));
  } else if (is("contexts")) {
    CUdevice device;
    cuDeviceGet(&device, 0);
    for (int other = 0; other < 4; other++) {
      CUcontext context;
      CUctxCreateParams parameters = {};
      if (cuCtxCreate(&context, &parameters, 0, device) != CUDA_SUCCESS) return 11;
      int *own = nullptr;
      CHECK(cudaMalloc(&own, size));
      for (long number = 0; number < kernels; number++) write_memory<<<16, 256>>>(own, size / 4, cycles);
    }
  } else if (is("each")) {
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    for (int device = 0; device < devices; device++) {
      int *own = nullptr;
      CHECK(cudaSetDevice(device));
      CHECK(cudaMalloc(&own, size));
      for (long number = 0; number < kernels; number++) write_memory<<<64, 256>>>(own, size / 4, cycles);
    }
  } else {
    for (long number = 0; number < kernels; number++) launch(number);
  }
  say("queued");
  if (ends_by("sync_pause")) {
    CHECK(cudaDeviceSynchronize());
    say("synced");
    usleep(seconds * 1e6);
    return 0;
  }
  if (seconds > 0) usleep(300000);
  say("ending");
  if (ends_by("exit")) exit(0);
  if (ends_by("_exit")) _exit(0);
  if (ends_by("abort")) abort();
  if (ends_by("segv")) raise(SIGSEGV);
  if (ends_by("exec")) execl("/bin/sleep", "sleep", "3", (char *)nullptr);
  while (ends_by("oom")) memset(malloc((size_t)64 << 20), 1, (size_t)64 << 20);
  usleep(seconds * 1e6);
  return 0;
}
