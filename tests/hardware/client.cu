// A CUDA client for the lab: client MODE SECONDS [MIB [BLOCKS [STREAMS]]]
//
// It prints one JSON line when it is ready (what CUDA tells it of its limits) and one at the end.
// Modes:  idle       a context and nothing else
//         spin       kernels of BLOCKS blocks of 1 ms without a pause, in STREAMS streams
//         rate       short kernels without a pause; says four times a second how many there were
//         fault      idle, then writes to an illegal address
//         overrun    idle, then writes behind its memory
//         faulthold  as fault, but catches the error and stays for 8 s
//         hog        allocates device memory until CUDA refuses, then idles
//         contexts   makes two contexts (driver API) and idles
//         each       short kernels without a pause, on each GPU that it sees
//         eachidle   a context on each GPU that it sees, and nothing else
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime.h>

static double seconds() {
  timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return moment.tv_sec + moment.tv_nsec * 1e-9;
}

static void pause_for(double duration) {
  for (double end = seconds() + duration; seconds() < end;) usleep(10000);
}

__global__ void busy(long long cycles, float *out) {
  long long begin = clock64();
  float value = threadIdx.x;
  while (clock64() - begin < cycles) value = value * 1.0001f + 1e-6f;
  if (value == 12345.678f) *out = value;
}

__global__ void overrun(int *memory) {
  for (size_t i = 0;; i += 1 << 20) memory[i] = 1;
}
__global__ void illegal(int *address) { *address = 1; }

static int failed(const char *where, cudaError_t error) {
  printf("{\"event\":\"error\",\"pid\":%d,\"where\":\"%s\",\"code\":%d,\"name\":\"%s\"}\n",
         getpid(), where, (int)error, cudaGetErrorName(error));
  fflush(stdout);
  return 10;
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "idle";
  double duration = argc > 2 ? atof(argv[2]) : 5;
  size_t mebibytes = argc > 3 ? atol(argv[3]) : 64;
  int blocks = argc > 4 ? atoi(argv[4]) : 8;
  int streams = argc > 5 ? atoi(argv[5]) : 1;

  double begin = seconds();
  cudaError_t error = cudaFree(0);
  if (error != cudaSuccess) return failed("init", error);
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, 0);
  float *memory = nullptr;
  if (mebibytes && (error = cudaMalloc(&memory, mebibytes << 20)) != cudaSuccess)
    return failed("malloc", error);
  CUcontext second = nullptr;
  if (!strcmp(mode, "contexts")) {
    CUdevice device;
    cuDeviceGet(&device, 0);
#if CUDA_VERSION >= 13000
    cuCtxCreate(&second, nullptr, 0, device);
#else
    cuCtxCreate(&second, 0, device);
#endif
    cudaSetDevice(0);
  }
  int devices = 1;
  if (!strncmp(mode, "each", 4)) cudaGetDeviceCount(&devices);
  for (int device = devices - 1; device >= 0; device--) {
    cudaSetDevice(device);
    if ((error = cudaFree(0)) != cudaSuccess) return failed("init", error);
  }
  size_t free_bytes, total_bytes;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  printf("{\"event\":\"ready\",\"pid\":%d,\"uid\":%d,\"init_seconds\":%.3f,\"sms\":%d,"
         "\"free_bytes\":%zu}\n",
         getpid(), getuid(), seconds() - begin, properties.multiProcessorCount, free_bytes);
  fflush(stdout);

  long kernels = 0;
  double end = seconds() + duration;
  if (!strcmp(mode, "fault") || !strcmp(mode, "faulthold") || !strcmp(mode, "overrun")) {
    pause_for(duration);
    if (!strcmp(mode, "overrun")) overrun<<<1, 1>>>((int *)memory);
    else illegal<<<1, 1>>>((int *)0x10);
    error = cudaDeviceSynchronize();
    failed("kernel", error);
    if (strcmp(mode, "faulthold")) return 10;
    pause_for(8);
  } else if (!strcmp(mode, "spin")) {
    cudaStream_t stream[64] = {};  // the first is the default stream
    if (streams > 64) streams = 64;
    for (int i = 1; i < streams; i++) cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking);
    while (seconds() < end) {
      for (int i = 0; i < streams; i++) busy<<<blocks, 128, 0, stream[i]>>>(2000000LL, memory);
      if ((error = cudaDeviceSynchronize()) != cudaSuccess) return failed("kernel", error);
      kernels += streams;
    }
  } else if (!strcmp(mode, "rate")) {
    double told = seconds();
    for (long first = 0; seconds() < end;) {
      busy<<<blocks, 128>>>(50000LL, memory);
      if ((error = cudaDeviceSynchronize()) != cudaSuccess) return failed("kernel", error);
      kernels++;
      double moment = seconds();
      if (moment - told < 0.25) continue;
      printf("{\"event\":\"rate\",\"from\":%.6f,\"to\":%.6f,\"kernels\":%ld}\n", told, moment,
             kernels - first);
      fflush(stdout);
      told = moment;
      first = kernels;
    }
  } else if (!strcmp(mode, "each")) {
    while (seconds() < end) {
      for (int device = 0; device < devices; device++) {
        cudaSetDevice(device);
        busy<<<blocks, 128>>>(50000LL, nullptr);
        if ((error = cudaDeviceSynchronize()) != cudaSuccess) return failed("kernel", error);
      }
      kernels += devices;
    }
  } else if (!strcmp(mode, "hog")) {
    size_t taken = 0;
    void *piece;
    while (cudaMalloc(&piece, 64u << 20) == cudaSuccess) taken += 64u << 20;
    printf("{\"event\":\"full\",\"pid\":%d,\"bytes\":%zu}\n", getpid(), taken);
    fflush(stdout);
    pause_for(duration);
  } else {
    // An idle client notices only at its next call that its server is gone.
    while (seconds() < end) {
      pause_for(0.2);
      for (int device = 0; device < devices; device++) {
        cudaSetDevice(device);
        if ((error = cudaDeviceSynchronize()) != cudaSuccess) return failed("idle", error);
      }
    }
  }
  printf("{\"event\":\"done\",\"pid\":%d,\"kernels\":%ld,\"seconds\":%.2f}\n", getpid(), kernels,
         seconds() - begin);
  return 0;
}
