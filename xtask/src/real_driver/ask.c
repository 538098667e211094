// Asks CUDA's driver library what programs ask it, and prints its answers. With the guard in front of the library they must be the same.
//
//   ask functions NAMES [init]   where dlsym and both versions of cuGetProcAddress find each name, for each version of CUDA and each flag; a line for each change
//   ask calls                    ordinals of GPUs, texts of errors, a fork, and another namespace of the loader
//   ask runtime LIBRARY          what a program of CUDA's runtime library gets
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int (*First)(const char *, void **, int, unsigned long);
typedef int (*Second)(const char *, void **, int, unsigned long, int *);

static void *driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) { printf("dlopen: %s\n", dlerror()); exit(1); }
    return library;
}

// The library that has an address, and where in it.
static const char *place(void *address) {
    static char text[512];
    Dl_info info;
    if (address == (void *)0x77) return "untouched";
    if (!address) return "null";
    if (!dladdr(address, &info)) return "nowhere";
    const char *name = strrchr(info.dli_fname, '/');
    snprintf(text, sizeof text, "%s+0x%lx", name ? name + 1 : info.dli_fname, (unsigned long)((char *)address - (char *)info.dli_fbase));
    return text;
}

static void change(char *before, const char *question, const char *answer) {
    if (strcmp(before, answer)) { printf("%s = %s\n", question, answer); strcpy(before, answer); }
}

static int functions(const char *file, int initialize) {
    static const int versions[] = {2000, 2010, 3000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050, 8000, 9000, 9020, 10000, 10010, 10020, 11000, 11010,
        11020, 11030, 11040, 11050, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000, 13010, 13040, 99999, 0, -1};
    void *library = driver();
    if (initialize) printf("cuInit = %d\n", ((int (*)(unsigned))dlsym(library, "cuInit"))(0));
    First first = (First)dlsym(library, "cuGetProcAddress");
    Second second = (Second)dlsym(library, "cuGetProcAddress_v2");
    FILE *names = fopen(file, "r");
    char name[200], question[300], answer[600];
    while (names && fgets(name, sizeof name, names)) {
        name[strcspn(name, "\n")] = 0;
        printf("dlsym %s = %s\n", name, place(dlsym(library, name)));
        for (unsigned long flags = 0; flags < 4; flags++) {
            char before[2][600] = {"", ""};
            for (unsigned at = 0; at < sizeof versions / sizeof *versions; at++) {
                void *found = (void *)0x77;
                int status = 77;
                if (first) {
                    int code = first(name, &found, versions[at], flags);
                    sprintf(answer, "%d %s", code, place(found));
                    sprintf(question, "first %s %lu %d", name, flags, versions[at]);
                    change(before[0], question, answer);
                }
                found = (void *)0x77;
                if (second) {
                    int code = second(name, &found, versions[at], flags, &status);
                    sprintf(answer, "%d %s %d", code, place(found), status);
                    sprintf(question, "second %s %lu %d", name, flags, versions[at]);
                    change(before[1], question, answer);
                }
            }
        }
    }
    return 0;
}

#define CALL(name, ...) ({ int (*call)() = (int (*)())dlsym(library, #name); call ? call(__VA_ARGS__) : -1; })

static void ordinals(void *library, const char *when) {
    static const int all[] = {0, 1, 2, 63, 64, 65, 1000, 0x7fffffff, -1, -2, 0x80000000};
    for (unsigned at = 0; at < sizeof all / sizeof *all; at++) {
        void *context = 0;
        size_t bytes = 0;
        int ordinal = all[at];
        printf("%s ordinal %d: cuCtxCreate_v2 %d, cuDevicePrimaryCtxRetain %d, cuDevicePrimaryCtxRelease_v2 %d, cuDeviceTotalMem_v2 %d\n", when, ordinal,
            CALL(cuCtxCreate_v2, &context, 0, ordinal), CALL(cuDevicePrimaryCtxRetain, &context, ordinal), CALL(cuDevicePrimaryCtxRelease_v2, ordinal),
            CALL(cuDeviceTotalMem_v2, &bytes, ordinal));
    }
    void *pointer = 0;
    size_t free = 0, total = 0;
    printf("%s memory: %d %d %d %d\n", when, CALL(cuMemAlloc_v2, &pointer, (size_t)4096), CALL(cuMemAlloc_v2, &pointer, (size_t)0),
        CALL(cuMemAlloc_v2, &pointer, (size_t)1 << 62), CALL(cuMemGetInfo_v2, &free, &total));
}

static int calls(void) {
    void *library = driver();
    int version = 0;
    printf("cuDriverGetVersion %d %d\n", CALL(cuDriverGetVersion, &version), version);
    ordinals(library, "before cuInit");
    printf("cuInit %d\n", CALL(cuInit, 0));
    ordinals(library, "after cuInit");
    for (int code = -1; code <= 1000; code++) {
        const char *name = 0, *text = 0;
        int named = CALL(cuGetErrorName, code, &name), said = CALL(cuGetErrorString, code, &text);
        if (name || text) printf("error %d: %d %s, %d %s\n", code, named, name ? name : "-", said, text ? text : "-");
    }
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        void *context = 0;
        printf("in a fork: cuInit %d, cuCtxGetCurrent %d\n", CALL(cuInit, 0), CALL(cuCtxGetCurrent, &context));
        fflush(stdout);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    void *other = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    printf("dlmopen: %s\n", other ? "loaded" : dlerror());
    if (other) { library = other; printf("in another namespace: cuInit %d\n", CALL(cuInit, 0)); }
    return status;
}

static int runtime(const char *file) {
    void *library = dlopen(file, RTLD_NOW);
    if (!library) { printf("%s\n", dlerror()); return 1; }
    const char *(*text)(int) = (const char *(*)(int))dlsym(library, "cudaGetErrorString");
    for (int round = 0; round < 2; round++) {
        int count = -7, version = -7, code = CALL(cudaDriverGetVersion, &version);
        printf("cudaDriverGetVersion %d %d\n", code, version);
        code = CALL(cudaGetDeviceCount, &count);
        printf("cudaGetDeviceCount %d %d: %s\n", code, count, text(code));
        void *pointer = 0;
        size_t free = 1, total = 2;
        printf("cudaMalloc %d", CALL(cudaMalloc, &pointer, (size_t)4096));
        printf(", cudaMemGetInfo %d", CALL(cudaMemGetInfo, &free, &total));
        printf(", cudaMallocManaged %d", CALL(cudaMallocManaged, &pointer, (size_t)4096, 1));
        printf(", cudaMallocAsync %d", CALL(cudaMallocAsync, &pointer, (size_t)4096, (void *)0));
        printf(", cudaSetDevice %d, cudaFree %d, cudaDeviceSynchronize %d\n", CALL(cudaSetDevice, 0), CALL(cudaFree, (void *)0), CALL(cudaDeviceSynchronize));
    }
    return 0;
}

int main(int count, char **words) {
    if (count > 2 && !strcmp(words[1], "functions")) return functions(words[2], count > 3);
    if (count > 1 && !strcmp(words[1], "calls")) return calls();
    if (count > 2 && !strcmp(words[1], "runtime")) return runtime(words[2]);
    return 2;
}
