#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

__global__ void add(const float *a, const float *b, float *c, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) c[at] = a[at] + b[at];
}

static void check(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
    exit(1);
}

int main(int argc, char **argv) {
    const int n = 1 << 20;
    float *a, *b, *c;
    check(cudaMallocManaged(&a, n * sizeof(float)), "a");
    check(cudaMallocManaged(&b, n * sizeof(float)), "b");
    check(cudaMalloc(&c, n * sizeof(float)), "c");
    for (int i = 0; i < n; i++) a[i] = b[i] = i % 100;
    add<<<(n + 255) / 256, 256>>>(a, b, c, n);
    check(cudaGetLastError(), "add");
    float *host = (float *)malloc(n * sizeof(float));
    check(cudaMemcpy(host, c, n * sizeof(float), cudaMemcpyDeviceToHost), "copy");
    double sum = 0;
    for (int i = 0; i < n; i++) sum += host[i];
    size_t free, total;
    check(cudaMemGetInfo(&free, &total), "memory");
    void *more;
    size_t share = argc > 1 ? strtoull(argv[1], 0, 10) : 0;
    cudaError_t above = cudaMalloc(&more, share + (1ull << 30));
    const char *text = above == cudaSuccess ? "success" : above == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorString(above);
    printf("{\"same\": [%.0f], \"total\": %zu, \"above\": \"%s\"}\n", sum, total, text);
}
