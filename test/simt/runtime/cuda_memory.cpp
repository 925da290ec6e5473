// CUDA's functions for memory. A copy to a device reads its source when it runs, also one that is not pinned:
// "might be synchronous with respect to host" is all that CUDA says of that.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "simt/runtime/runtime.h"

namespace {

using namespace simt::runtime;

enum class Place { pageable, pinned, device };

Place place_of(const Runtime& r, const void* address) {
    const Block* block = r.memory.block_of(address);
    if (!block) return Place::pageable;
    return block->device == Block::pinned ? Place::pinned : Place::device;
}

bool agrees(cudaMemcpyKind kind, bool to_device, bool from_device) {
    switch (kind) {
        case cudaMemcpyHostToHost:
            return !to_device && !from_device;
        case cudaMemcpyHostToDevice:
            return to_device && !from_device;
        case cudaMemcpyDeviceToHost:
            return !to_device && from_device;
        case cudaMemcpyDeviceToDevice:
            return to_device && from_device;
        case cudaMemcpyDefault:
            return true;
    }
    return false;
}

// Whether memory that may be gone holds these bytes.
bool still_holds(const void* memory, const std::vector<std::byte>& bytes) {
    std::vector<std::byte> now(bytes.size());
    const iovec to{now.data(), now.size()}, from{const_cast<void*>(memory), now.size()};
    const ssize_t count = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    if (count < 0 && (errno == EPERM || errno == ENOSYS)) return true;  // a sandbox: nobody can tell
    return count == static_cast<ssize_t>(bytes.size()) && now == bytes;
}

cudaError_t copy(Runtime& r, const char* call, void* to, const void* from, std::size_t bytes,
                 cudaMemcpyKind kind, cudaStream_t stream) {
    if (r.strikes("memcpy")) return r.fault();
    const Place to_place = place_of(r, to);
    const Place from_place = place_of(r, from);
    if (!agrees(kind, to_place == Place::device, from_place == Place::device)) return cudaErrorInvalidValue;
    if (!r.memory.is_one_piece(to, bytes) || !r.memory.is_one_piece(from, bytes))
        return cudaErrorInvalidValue;
    if (bytes == 0) return cudaSuccess;
    if (to_place == Place::device && from_place != Place::device) {
        r.counts.uploads(from_place == Place::pinned, r.streams.get(stream).number);
    }
    std::vector<Access> accesses;
    if (to_place != Place::pageable) accesses.push_back(writes(to, bytes));
    if (from_place != Place::pageable) accesses.push_back(reads(from, bytes));
    const bool staged = from_place == Place::pageable && to_place == Place::device;
    const auto* source = static_cast<const std::byte*>(from);
    std::vector<std::byte> stage(source, source + (staged ? bytes : 0));
    r.streams.add(
        stream, call,
        [=, call = std::string(call), stage = std::move(stage)] {
            if (staged && !still_holds(from, stage))
                stop(call + ": its source is not pinned, and is gone or changed before it was read");
            std::memcpy(to, staged ? stage.data() : from, bytes);
            return true;
        },
        accesses);
    const bool host_waits = !staged && (to_place == Place::pageable || from_place == Place::pageable);
    if (host_waits) r.streams.synchronize(stream, call);
    return cudaSuccess;
}

cudaError_t set(Runtime& r, const char* call, void* to, int value, std::size_t bytes, cudaStream_t stream) {
    if (place_of(r, to) == Place::pageable || !r.memory.is_one_piece(to, bytes)) return cudaErrorInvalidValue;
    if (bytes == 0) return cudaSuccess;
    const Access access = writes(to, bytes);
    r.streams.add(stream, call,
                  [=] {
                      std::memset(to, value, bytes);
                      return true;
                  },
                  {&access, 1});
    return cudaSuccess;
}

cudaError_t allocate(Runtime& r, void** memory, std::size_t bytes, int device) {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    *memory = r.memory.allocate(bytes, device);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t release(Runtime& r, const char* call, void* memory, bool pinned) {
    if (memory == nullptr) return cudaSuccess;
    const bool known = r.memory.begins_block(memory) && (place_of(r, memory) == Place::pinned) == pinned;
    if (!known) stop(std::string(call) + " of memory that was not allocated, or already freed");
    if (!pinned) r.streams.synchronize_all(call);
    r.streams.forget(memory, r.memory.block_of(memory)->bytes, call);
    r.memory.release(memory);
    return cudaSuccess;
}

}  // namespace

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    return api_call([&](Runtime& r) {
        if (r.strikes("malloc")) return r.fault();
        const bool fits = bytes <= r.settings.gpu_memory - r.memory_taken(current_device());
        if (!fits || r.is_struck("memory")) return cudaErrorMemoryAllocation;
        r.counts.allocates(bytes);
        return allocate(r, memory, bytes, current_device());
    });
}

cudaError_t cudaFree(void* memory) {
    return api_call([&](Runtime& r) { return release(r, "cudaFree", memory, false); });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
    return api_call([&](Runtime& r) {
        const bool fits = bytes <= r.settings.host_memory - r.memory.used(Block::pinned);
        if (!fits || r.is_struck("hostmalloc")) return cudaErrorMemoryAllocation;
        return allocate(r, memory, bytes, Block::pinned);
    });
}

cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }

cudaError_t cudaFreeHost(void* memory) {
    return api_call([&](Runtime& r) { return release(r, "cudaFreeHost", memory, true); });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    return api_call([&](const Runtime& r) {
        const Place place = place_of(r, address);
        *attributes = {};
        attributes->type = place == Place::device   ? cudaMemoryTypeDevice
                           : place == Place::pinned ? cudaMemoryTypeHost
                                                    : cudaMemoryTypeUnregistered;
        return cudaSuccess;
    });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    return api_call([&](const Runtime& r) {
        *total = r.settings.gpu_memory;
        *free = *total - r.memory_taken(current_device());
        return cudaSuccess;
    });
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    return api_call([&](Runtime& r) { return copy(r, "cudaMemcpy", to, from, bytes, kind, nullptr); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return api_call([&](Runtime& r) { return copy(r, "cudaMemcpyAsync", to, from, bytes, kind, stream); });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
    return api_call([&](Runtime& r) { return set(r, "cudaMemset", to, value, bytes, nullptr); });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    return api_call([&](Runtime& r) { return set(r, "cudaMemsetAsync", to, value, bytes, stream); });
}
