/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml.so.1 for tests: NVML's ABI over the machine that VLLM_NVML_STUB describes.
 *
 *   error=18                      nvmlInit fails with that code
 *   device;device;...             fields of a device, in this order, split by '|':
 *     name | capability | total MiB | free MiB | UUID | PCI bus id | MIG
 *   "-" in capability or total MiB: the device does not report it.
 *   MIG: "-" no such mode, "off", or "on" followed by ,UUID:MiB for each instance.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, MAX_DEVICES = 16, MAX_INSTANCES = 8, TEXT = 96
};

typedef struct Device {
    char name[TEXT], uuid[TEXT], bus_id[32];
    int has_capability, major, minor;
    int has_memory;
    unsigned long long total_mib, free_mib;
    int mig; /* -1 no such mode, 0 off, 1 on */
    int num_instances;
    struct Device *parent; /* of a MIG instance */
    struct Device *instances;
} Device;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

static Device devices[MAX_DEVICES];
static Device instances[MAX_DEVICES][MAX_INSTANCES];
static unsigned num_devices;
static int num_users;

static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

static void read_instances(Device *device, char *list) {
    char *rest = NULL;
    for (char *item = strtok_r(list, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        char *colon = strchr(item, ':');
        if (!colon || device->num_instances == MAX_INSTANCES) continue;
        *colon = 0;
        Device *instance = &device->instances[device->num_instances++];
        *instance = *device;
        instance->parent = device;
        instance->has_memory = 1;
        instance->total_mib = instance->free_mib = strtoull(colon + 1, NULL, 10);
        instance->num_instances = 0;
        copy(instance->uuid, TEXT, item);
    }
}

static void read_device(Device *device, char *text) {
    char *fields[7];
    for (int i = 0; i < 7; i++) fields[i] = strsep(&text, "|");
    for (int i = 0; i < 7; i++) if (!fields[i]) fields[i] = "-";
    copy(device->name, TEXT, fields[0]);
    device->has_capability = sscanf(fields[1], "%d.%d", &device->major, &device->minor) == 2;
    device->has_memory = sscanf(fields[2], "%llu", &device->total_mib) == 1;
    device->free_mib = strtoull(fields[3], NULL, 10);
    copy(device->uuid, TEXT, fields[4]);
    copy(device->bus_id, sizeof device->bus_id, fields[5]);
    device->mig = strncmp(fields[6], "on", 2) == 0 ? 1 : strcmp(fields[6], "off") == 0 ? 0 : -1;
    if (device->mig == 1 && fields[6][2] == ',') read_instances(device, fields[6] + 3);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *spec = getenv("VLLM_NVML_STUB");
    int code;
    if (spec && sscanf(spec, "error=%d", &code) == 1) return code;
    if (num_users++) return SUCCESS;
    memset(devices, 0, sizeof devices);
    num_devices = 0;
    char *all = strdup(spec ? spec : ""), *text = all, *item;
    while ((item = strsep(&text, ";")) && num_devices < MAX_DEVICES) {
        if (!*item) continue;
        devices[num_devices].instances = instances[num_devices];
        read_device(&devices[num_devices++], item);
    }
    free(all);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

/* A marker on the way out, so that a test can see that NVML was shut down again. */
int nvmlShutdown(void) {
    if (!num_users) return UNINITIALIZED;
    const char *log = getenv("VLLM_NVML_STUB_SHUTDOWN_FILE");
    FILE *file = log && num_users == 1 ? fopen(log, "a") : NULL;
    if (file) { fputs("shutdown\n", file); fclose(file); }
    num_users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case 3: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 18: return "Driver/library version mismatch";
    default: return "Stubbed error";
    }
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!num_users) return UNINITIALIZED;
    *count = num_devices;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (!num_users) return UNINITIALIZED;
    if (index >= num_devices) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

static int answer(char *to, unsigned size, const char *text) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *d, char *name, unsigned size) {
    return num_users ? answer(name, size, d->name) : UNINITIALIZED;
}

int nvmlDeviceGetUUID(Device *d, char *uuid, unsigned size) {
    return num_users ? answer(uuid, size, d->uuid) : UNINITIALIZED;
}

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    if (!num_users) return UNINITIALIZED;
    if (d->parent) return INVALID_ARGUMENT; /* of the parent only */
    if (!d->has_capability) return NOT_SUPPORTED;
    *major = d->major;
    *minor = d->minor;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *d, Memory *memory) {
    if (!num_users) return UNINITIALIZED;
    if (!d->has_memory) return NOT_SUPPORTED;
    memory->total = d->total_mib << 20;
    memory->free = d->free_mib << 20;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *info) {
    if (!num_users) return UNINITIALIZED;
    if (d->parent) return INVALID_ARGUMENT;
    memset(info, 0, sizeof *info);
    copy(info->bus_id, sizeof info->bus_id, d->bus_id);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    if (!num_users) return UNINITIALIZED;
    if (d->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)d->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) {
    (void)d;
    *count = MAX_INSTANCES;
    return num_users ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **instance) {
    if (!num_users) return UNINITIALIZED;
    if (d->parent || index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    if (index >= (unsigned)d->num_instances) return NOT_FOUND;
    *instance = &d->instances[index];
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(Device *d, unsigned *is_mig) {
    *is_mig = d->parent != NULL;
    return num_users ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *d, Device **parent) {
    if (!num_users) return UNINITIALIZED;
    if (!d->parent) return INVALID_ARGUMENT;
    *parent = d->parent;
    return SUCCESS;
}
