#include "llmc/device/device.h"

#include <utility>

#include "llmc/core/text.h"

namespace llmc {

Arenas::Arenas(Device& device, MemoryLayout layout) : device_(device), layout_(std::move(layout)) {
    for (const ArenaKind kind : all_arenas) {
        const std::size_t bytes = layout_.bytes(kind);
        if (bytes > 0) memory_[static_cast<std::size_t>(kind)] = device_.allocate(bytes, name_of(kind));
    }
}

Arenas::~Arenas() {
    for (std::byte* memory : memory_) device_.release(memory);
}

Tensor Arenas::operator[](BufferId id) const {
    check(id.index >= 0 && id.index < static_cast<int>(layout_.buffers().size()), "a buffer of this layout");
    const MemoryLayout::Buffer& buffer = layout_.buffers()[static_cast<std::size_t>(id.index)];
    return {memory_[static_cast<std::size_t>(buffer.arena)] + buffer.offset, buffer.dtype, buffer.shape};
}

std::string_view name_of(StreamKind stream) {
    return name_among(stream, "compute", "communication", "activations in", "activations out", "gradients in",
                      "gradients out", "copy");
}

}  // namespace llmc
