/* The part of the DLPack ABI (major version 1, https://dmlc.github.io/dlpack) that is used here, in our own words. */
#ifndef SPARSELIFT_DLPACK_ABI_H
#define SPARSELIFT_DLPACK_ABI_H

#include <stdint.h>

#define SL_DLPACK_MAJOR 1
enum { SL_DL_CPU = 1 };
enum { SL_DL_INT = 0, SL_DL_FLOAT = 2, SL_DL_BFLOAT = 4 };

typedef struct {
    uint32_t major;
    uint32_t minor;
} sl_dl_version;

typedef struct {
    void* data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t dtype_code;
    uint8_t dtype_bits;
    uint16_t dtype_lanes;
    int64_t* shape;
    int64_t* strides;          /* in elements; NULL: C-contiguous */
    uint64_t byte_offset;
} sl_dl_tensor;

typedef struct sl_dl_managed {
    sl_dl_version version;
    void* manager_ctx;
    void (*deleter)(struct sl_dl_managed* self);
    uint64_t flags;
    sl_dl_tensor tensor;
} sl_dl_managed;

/* What the capsule `__dlpack_c_exchange_api__` of a tensor type points to. Functions that take or give a Python object need
 * the GIL, and return -1 with a Python exception set. */
typedef struct {
    sl_dl_version version;
    void* previous;
    int (*allocate)(sl_dl_tensor* prototype, sl_dl_managed** out, void* context, void (*set_error)(void*, const char*, const char*));
    int (*managed_from_object)(void* object, sl_dl_managed** out);
    int (*object_from_managed)(sl_dl_managed* managed, void** object);       /* takes `managed` over */
    int (*tensor_from_object)(void* object, sl_dl_tensor* out);              /* borrows; may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
} sl_dl_exchange;

#endif
