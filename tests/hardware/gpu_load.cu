// Known loads for one GPU, each with its own account of what it did, as one line of JSON.
//
//   gpu_load pulse BLOCKS ON_MS OFF_MS SECONDS   kernels of a known length with known pauses
//   gpu_load memory SECONDS                      copies device memory as fast as it goes
//   gpu_load copy GIB                            moves bytes to the device, then back
//   gpu_load fault                               reads an address that it may not read
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>

#define CHECK(call)                                                                     \
    do {                                                                                \
        cudaError_t status = (call);                                                    \
        if (status != cudaSuccess) {                                                    \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));             \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

__device__ unsigned long long device_nanoseconds() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__global__ void spin(unsigned long long nanoseconds, unsigned long long *first,
                     unsigned long long *last) {
    unsigned long long start = device_nanoseconds();
    if (threadIdx.x == 0) atomicMin(first, start);
    while (device_nanoseconds() - start < nanoseconds) {
    }
    if (threadIdx.x == 0) atomicMax(last, device_nanoseconds());
}

__global__ void copy_memory(const float4 *from, float4 *to, size_t count) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = from[i];
}

__global__ void read_anywhere(volatile int *address) { *(volatile int *)0x10 = *address; }

static void pulse(int blocks, double on_ms, double off_ms, double seconds) {
    unsigned long long *times, span[2];
    CHECK(cudaMalloc(&times, sizeof span));
    double busy = 0, begin = now();
    long pulses = 0;
    while (now() - begin < seconds) {
        span[0] = ~0ull;
        span[1] = 0;
        CHECK(cudaMemcpy(times, span, sizeof span, cudaMemcpyHostToDevice));
        spin<<<blocks, 128>>>((unsigned long long)(on_ms * 1e6), &times[0], &times[1]);
        CHECK(cudaMemcpy(span, times, sizeof span, cudaMemcpyDeviceToHost));
        busy += (span[1] - span[0]) * 1e-9;
        pulses++;
        if (off_ms > 0) usleep((useconds_t)(off_ms * 1e3));
    }
    printf("{\"busy_seconds\": %.6f, \"wall_seconds\": %.6f, \"pulses\": %ld}\n", busy,
           now() - begin, pulses);
}

static void memory(double seconds) {
    size_t bytes = (size_t)4 << 30;
    float4 *from, *to;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    CHECK(cudaMemset(from, 1, bytes));
    CHECK(cudaDeviceSynchronize());
    double begin = now(), moved = 0;
    while (now() - begin < seconds) {
        for (int i = 0; i < 20; i++) {
            copy_memory<<<1320, 512>>>(from, to, bytes / sizeof(float4));
            moved += 2.0 * bytes;
        }
        CHECK(cudaDeviceSynchronize());
    }
    double took = now() - begin;
    printf("{\"bytes\": %.0f, \"wall_seconds\": %.6f, \"bytes_per_second\": %.6g}\n", moved, took,
           moved / took);
}

static void copy(double gib) {
    size_t bytes = (size_t)1 << 30;
    char *host, *device;
    CHECK(cudaMallocHost(&host, bytes));
    memset(host, 1, bytes);
    CHECK(cudaMalloc(&device, bytes));
    double took[2];
    for (int back = 0; back < 2; back++) {
        double begin = now();
        for (int i = 0; i < (int)gib; i++)
            CHECK(cudaMemcpyAsync(back ? host : device, back ? device : host, bytes,
                                  back ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice));
        CHECK(cudaDeviceSynchronize());
        took[back] = now() - begin;
    }
    double moved = (double)(int)gib * bytes;
    printf("{\"bytes\": %.0f, \"to_device_seconds\": %.6f, \"to_host_seconds\": %.6f}\n", moved,
           took[0], took[1]);
}

static void fault() {
    read_anywhere<<<1, 1>>>((volatile int *)0x10);
    cudaError_t status = cudaDeviceSynchronize();
    printf("{\"status\": %d, \"error\": \"%s\"}\n", (int)status, cudaGetErrorString(status));
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    if (!strcmp(mode, "pulse") && argc == 6) {
        CHECK(cudaSetDeviceFlags(cudaDeviceScheduleSpin));
        pulse(atoi(argv[2]), atof(argv[3]), atof(argv[4]), atof(argv[5]));
    } else if (!strcmp(mode, "memory") && argc == 3) {
        memory(atof(argv[2]));
    } else if (!strcmp(mode, "copy") && argc == 3) {
        copy(atof(argv[2]));
    } else if (!strcmp(mode, "fault")) {
        fault();
    } else {
        fprintf(stderr, "usage: gpu_load pulse|memory|copy|fault ...\n");
        return 2;
    }
    return 0;
}
