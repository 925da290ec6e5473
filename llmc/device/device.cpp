#include "llmc/device/device.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "llmc/core/scratch_file.h"
#include "llmc/core/text.h"

namespace llmc {

void upload_rounded(Device& device, const Tensor& to, std::span<const float> from) {
    check(std::ssize(from) == to.elements(), "as many numbers as elements");
    if (to.dtype == DType::fp32) return device.upload(to, from.data());
    with_dtype(to.dtype, [&](auto element) {
        using X = decltype(element);
        std::vector<X> rounded(from.size());
        std::ranges::transform(from, rounded.begin(), from_float<X>);
        device.upload(to, rounded.data());
    });
}

void download_widened(Device& device, std::span<float> to, const Tensor& from) {
    check(std::ssize(to) == from.elements(), "as many numbers as elements");
    if (from.dtype == DType::fp32) return device.download(to.data(), from);
    with_dtype(from.dtype, [&](auto element) {
        std::vector<decltype(element)> values(to.size());
        device.download(values.data(), from);
        std::ranges::transform(values, to.begin(), [](auto x) { return to_float(x); });
    });
}

Arenas::Arenas(Device& device, MemoryLayout layout) : device_(device), layout_(std::move(layout)) {
    for (const ArenaKind kind : all_arenas) {
        try {
            allocate(kind);
        } catch (const UserError&) {
            if (kind != ArenaKind::checkpoint) throw;
        }
    }
}

void Arenas::allocate(ArenaKind kind) {
    const auto arena = static_cast<std::size_t>(kind);
    const std::size_t bytes = layout_.bytes(kind), of_host = layout_.host_sizes().bytes(kind);
    if (bytes > 0) memory_[arena] = device_.allocate(bytes, name_of(kind));
    if (of_host == 0) return;
    // Disks read into whole blocks of memory.
    std::size_t room = of_host + ScratchFile::alignment;
    host_memory_[arena] = device_.host_memory(room);
    void* first = host_memory_[arena].get();
    std::align(ScratchFile::alignment, of_host, first, room);
    of_host_[arena] = static_cast<std::byte*>(first);
    std::memset(first, 0, of_host);
}

bool Arenas::has_copy() const {
    constexpr auto arena = static_cast<std::size_t>(ArenaKind::checkpoint);
    return memory_[arena] != nullptr || of_host_[arena] != nullptr;
}

void Arenas::release_copy() {
    constexpr auto arena = static_cast<std::size_t>(ArenaKind::checkpoint);
    device_.release(std::exchange(memory_[arena], nullptr));
    of_host_[arena] = nullptr;
    host_memory_[arena] = {};
}

Arenas::~Arenas() {
    for (std::byte* memory : memory_) device_.release(memory);
}

Tensor Arenas::operator[](BufferId id) const {
    check(id.index >= 0 && id.index < static_cast<int>(layout_.buffers().size()), "a buffer of this layout");
    const MemoryLayout::Buffer& buffer = layout_.buffers()[static_cast<std::size_t>(id.index)];
    const auto arena = static_cast<std::size_t>(buffer.arena);
    std::byte* const memory = buffer.tier == Tier::host ? of_host_[arena] : memory_[arena];
    return {memory + buffer.offset, buffer.dtype, buffer.shape};
}

std::string_view name_of(StreamKind stream) {
    return name_among(stream, "compute", "communication", "activations in", "activations out", "gradients in",
                      "gradients out", "copy", "to device", "from device", "host", "disk in", "disk out");
}

}  // namespace llmc
