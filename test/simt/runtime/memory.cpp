#include "simt/runtime/memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef SIMT_ADDRESS
#include <sanitizer/asan_interface.h>
#endif

namespace simt::runtime {
namespace {

void show([[maybe_unused]] const char* begin, [[maybe_unused]] const Block& block) {
#ifdef SIMT_ADDRESS
    if (block.device != Block::pinned) __asan_unpoison_memory_region(begin, block.bytes);
#endif
}

void hide([[maybe_unused]] const char* begin, [[maybe_unused]] const Block& block) {
#ifdef SIMT_ADDRESS
    if (block.device != Block::pinned) __asan_poison_memory_region(begin, block.bytes);
#endif
}

}  // namespace

void stop(const std::string& message) {
    std::fprintf(stderr, "simt: %s\n", message.c_str());
    std::abort();
}

void* Memory::allocate(std::size_t bytes, int device) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes) != 0) return nullptr;
    std::memset(memory, 0xff, bytes);
    const auto* begin = static_cast<const char*>(memory);
    hide(begin, blocks_[begin] = {bytes, device});
    return memory;
}

void Memory::release(void* begin) {
    const auto block = blocks_.find(static_cast<const char*>(begin));
    show(block->first, block->second);
    std::memset(begin, 0xff, block->second.bytes);
    blocks_.erase(block);
    std::free(begin);
}

void Memory::release_all() {
    while (!blocks_.empty()) release(const_cast<char*>(blocks_.begin()->first));
}

const Block* Memory::block_of(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    const auto block = blocks_.lower_bound(at);  // the last one that begins there or before
    return block != blocks_.end() && at < block->first + block->second.bytes ? &block->second : nullptr;
}

bool Memory::is_one_piece(const void* begin, std::size_t bytes) const {
    if (bytes == 0) return true;
    const auto* first = static_cast<const char*>(begin);
    const auto last_block = blocks_.lower_bound(first + bytes - 1);
    if (!block_of(first))
        return last_block == blocks_.end() || last_block->first + last_block->second.bytes <= first;
    return last_block->first <= first && first + bytes <= last_block->first + last_block->second.bytes;
}

bool Memory::begins_block(const void* address) const {
    return blocks_.contains(static_cast<const char*>(address));
}

std::size_t Memory::used(int device) const {
    std::size_t sum = 0;
    for (const auto& [_, block] : blocks_) {
        if (block.device == device) sum += block.bytes;
    }
    return sum;
}

void Memory::show_device_memory() const {
    for (const auto& [begin, block] : blocks_) show(begin, block);
}

void Memory::hide_device_memory() const {
    for (const auto& [begin, block] : blocks_) hide(begin, block);
}

}  // namespace simt::runtime
