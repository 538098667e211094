/* Asks CUDA's driver library and NVML how much memory there is, and allocates.
 *
 * It prints a line for each fact: a name and a value. How it gets the libraries is its first argument, or is decided when it is compiled:
 * LINKED is linked with them, JNI is a library for Java. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#define CUDA "libcuda.so.1"
#define NVML "libnvidia-ml.so.1"

/* By cuda.h and nvml.h of the CUDA Toolkit. */
typedef unsigned long long pointer;
struct nvml_memory { unsigned long long total, free, used; };

#if defined STATIC && defined __GLIBC__ && __GLIBC_MINOR__ < 35
/* A newer compiler's libgcc asks the C library for it, to unwind. Nothing unwinds here. */
int _dl_find_object(void *address, void *result) { return -1; }
#endif

static void say(const char *name, long long value) { printf("%s %lld\n", name, value); }

static int probe(void *(*in_cuda)(const char *), void *(*in_nvml)(const char *)) {
    int (*init)(unsigned) = in_cuda("cuInit");
    int (*get)(int *, int) = in_cuda("cuDeviceGet");
    int (*total)(size_t *, int) = in_cuda("cuDeviceTotalMem_v2");
    int (*retain)(void **, int) = in_cuda("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = in_cuda("cuCtxSetCurrent");
    int (*info)(size_t *, size_t *) = in_cuda("cuMemGetInfo_v2");
    int (*allocate)(pointer *, size_t) = in_cuda("cuMemAlloc_v2");
    int (*start)(void) = in_nvml("nvmlInit_v2");
    int (*handle)(unsigned, void **) = in_nvml("nvmlDeviceGetHandleByIndex_v2");
    int (*memory)(void *, struct nvml_memory *) = in_nvml("nvmlDeviceGetMemoryInfo");
    if (!init || !get || !total || !retain || !set || !info || !allocate || !start || !handle || !memory) {
        say("functions-missing", 1);
        return 3;
    }
    int device = 0;
    void *context = NULL, *gpu = NULL;
    size_t bytes = 0, unused = 0;
    pointer large = 0, small = 0;
    struct nvml_memory described = {0, 0, 0};
    say("jemalloc", dlsym(RTLD_DEFAULT, "mallctl") != NULL);
    say("cuInit", init(0));
    say("cuDeviceGet", get(&device, 0));
    say("cuDeviceTotalMem", total(&bytes, device));
    say("memory:cuda-total", bytes);
    say("cuDevicePrimaryCtxRetain", retain(&context, device));
    say("cuCtxSetCurrent", set(context));
    bytes = 0;
    say("cuMemGetInfo", info(&unused, &bytes));
    say("memory:cuda-info", bytes);
    say("within-share:256MiB", allocate(&small, (size_t)256 << 20));
    say("above-share:2GiB", allocate(&large, (size_t)2 << 30));
    say("nvmlInit", start());
    say("nvmlDeviceGetHandleByIndex", handle(0, &gpu));
    say("nvmlDeviceGetMemoryInfo", memory(gpu, &described));
    say("memory:nvml-total", described.total);
    fflush(stdout);
    return 0;
}

#ifdef LINKED
int cuInit(unsigned), cuDeviceGet(int *, int), cuDeviceTotalMem_v2(size_t *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *),
    cuMemGetInfo_v2(size_t *, size_t *), cuMemAlloc_v2(pointer *, size_t), nvmlInit_v2(void), nvmlDeviceGetHandleByIndex_v2(unsigned, void **),
    nvmlDeviceGetMemoryInfo(void *, struct nvml_memory *);

static void *linked(const char *name) {
#define IS(function) if (!strcmp(name, #function)) return (void *)function
    IS(cuInit); IS(cuDeviceGet); IS(cuDeviceTotalMem_v2); IS(cuDevicePrimaryCtxRetain); IS(cuCtxSetCurrent); IS(cuMemGetInfo_v2); IS(cuMemAlloc_v2);
    IS(nvmlInit_v2); IS(nvmlDeviceGetHandleByIndex_v2); IS(nvmlDeviceGetMemoryInfo);
    return NULL;
}

int main(void) {
    /* The kernel says whether the program got rights by its mode (setuid); the loader then ignores LD_LIBRARY_PATH and the like. */
    say("secure", getauxval(AT_SECURE));
    return probe(linked, linked);
}
#else
static void *cuda, *nvml;

static void *in_cuda(const char *name) { return dlsym(cuda, name); }
static void *in_nvml(const char *name) { return dlsym(nvml, name); }

/* As CUDA's runtime library does it: the name has no version. */
static void *by_driver(const char *name) {
    int (*find)(const char *, void **, int, unsigned long long, int *) = dlsym(cuda, "cuGetProcAddress_v2");
    char plain[64];
    void *address = NULL;
    int status = -1;
    snprintf(plain, sizeof plain, "%s", name);
    if (strlen(plain) > 3 && !strcmp(plain + strlen(plain) - 3, "_v2")) plain[strlen(plain) - 3] = 0;
    if (!find || find(plain, &address, 12000, 0, &status)) return NULL;
    return address;
}

static int loaded(void) {
    if (cuda && nvml) return 1;
    fprintf(stderr, "%s\n", dlerror());
    say("not-loaded", 1);
    return 0;
}

static int with_flags(const char *first, const char *second, int flags) {
    cuda = dlopen(first, RTLD_NOW | flags);
    if (cuda) nvml = dlopen(second, RTLD_NOW | flags);
    return loaded() ? probe(in_cuda, in_nvml) : 3;
}

#ifdef JNI
int Java_Probe_probe(void *environment, void *class) { return with_flags(CUDA, NVML, RTLD_LOCAL); }
#else
int main(int count, char **words) {
    const char *way = count > 1 ? words[1] : "";
    if (!strcmp(way, "dlopen")) return with_flags(CUDA, NVML, RTLD_LOCAL);
    if (!strcmp(way, "plain-name")) return with_flags("libcuda.so", "libnvidia-ml.so", RTLD_GLOBAL);
    if (!strcmp(way, "proc-address")) {
        cuda = dlopen(CUDA, RTLD_NOW);
        if (cuda) nvml = dlopen(NVML, RTLD_NOW);
        return loaded() ? probe(by_driver, in_nvml) : 3;
    }
#ifdef __GLIBC__
    if (!strcmp(way, "deepbind")) return with_flags(CUDA, NVML, RTLD_DEEPBIND);
#ifndef STATIC
    if (!strcmp(way, "dlmopen")) {
        cuda = dlmopen(LM_ID_NEWLM, CUDA, RTLD_NOW);
        if (cuda) nvml = dlmopen(LM_ID_NEWLM, NVML, RTLD_NOW);
        return loaded() ? probe(in_cuda, in_nvml) : 3;
    }
#endif
#endif
    /* Start a program as a user without rights. */
    if (!strcmp(way, "as-nobody") && count > 2 && !setgid(65534) && !setuid(65534)) execv(words[2], words + 2);
    perror(way);
    return 4;
}
#endif
#endif
