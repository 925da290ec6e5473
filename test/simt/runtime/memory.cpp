#include "simt/runtime/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "simt/executor.h"

#ifdef SIMT_ADDRESS
#include <sanitizer/asan_interface.h>
#endif

namespace simt::runtime {
namespace {

constexpr std::size_t alignment = 256, large_page = std::size_t{2} << 20, most_bytes = std::size_t{1} << 42;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

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

std::unique_ptr<DeviceMapping> new_mapping() {
#if defined(SIMT_ADDRESS) || defined(SIMT_THREAD)
    return nullptr;
#else
    return std::make_unique<DeviceMapping>();
#endif
}

}  // namespace

void stop(const std::string& message) {
    std::fprintf(stderr, "simt: %s\n", message.c_str());
    std::abort();
}

// ---- the mapping ----

DeviceMapping::DeviceMapping() {
    void* const memory =
        mmap(nullptr, most_bytes + large_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) stop("no room in the address space for devices' memory");
    begin_ = reinterpret_cast<char*>(rounded_up(reinterpret_cast<std::uintptr_t>(memory), large_page));
    madvise(begin_, most_bytes, MADV_HUGEPAGE);  // opening and closing takes a time for each page
}

// Takes the first gap that is large enough.
char* DeviceMapping::allocate(std::size_t bytes) {
    const std::size_t size = rounded_up(bytes, alignment);
    for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
        const auto [place, room] = *gap;
        if (room < size) continue;
        free_.erase(gap);
        if (room > size) free_[place + size] = room - size;
        return begin_ + place;
    }
    if (size > most_bytes - used_) return nullptr;
    used_ += size;
    return begin_ + used_ - size;
}

void DeviceMapping::release(char* begin, std::size_t bytes) {
    const auto place = static_cast<std::size_t>(begin - begin_);
    auto gap = free_.emplace(place, rounded_up(bytes, alignment)).first;
    if (const auto next = std::next(gap); next != free_.end() && gap->first + gap->second == next->first) {
        gap->second += next->second;
        free_.erase(next);
    }
    if (gap == free_.begin()) return;
    const auto before = std::prev(gap);
    if (before->first + before->second != gap->first) return;
    before->second += gap->second;
    free_.erase(gap);
}

bool DeviceMapping::contains(const void* address) const {
    const auto* const at = static_cast<const char*>(address);
    return at >= begin_ && at < begin_ + most_bytes;
}

void DeviceMapping::open() {
    const std::size_t bytes = rounded_up(used_, large_page);
    if (opened_ == bytes) return;
    if (mprotect(begin_, bytes, PROT_READ | PROT_WRITE) != 0) stop("cannot open devices' memory");
    opened_ = bytes;
}

void DeviceMapping::close() {
    if (opened_ > 0 && mprotect(begin_, opened_, PROT_NONE) != 0) stop("cannot close devices' memory");
    opened_ = 0;
}

// ---- blocks ----

Memory::Memory() : mapping_(new_mapping()) {}

void* Memory::allocate(std::size_t bytes, int device) {
    void* memory = nullptr;
    const bool is_mapped = mapping_ && device != Block::pinned;
    if (is_mapped) {
        memory = mapping_->allocate(bytes);
        mapping_->open();
    } else if (posix_memalign(&memory, alignment, bytes) != 0) {
        memory = nullptr;
    }
    if (memory) std::memset(memory, 0xff, bytes);
    close();
    if (!memory) return nullptr;
    const auto* begin = static_cast<const char*>(memory);
    hide(begin, blocks_[begin] = {bytes, device});
    return memory;
}

void Memory::release(void* begin) {
    const auto found = blocks_.find(static_cast<const char*>(begin));
    const Block block = found->second;
    show(found->first, block);
    blocks_.erase(found);
    if (!mapping_ || block.device == Block::pinned) {
        std::memset(begin, 0xff, block.bytes);
        std::free(begin);
        return;
    }
    mapping_->open();
    std::memset(begin, 0xff, block.bytes);
    close();
    mapping_->release(static_cast<char*>(begin), block.bytes);
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

void Memory::begin_work() {
    working_ = std::this_thread::get_id();
    if (mapping_) catch_faults_on_a_stack_of_their_own();
    for (const auto& [begin, block] : blocks_) show(begin, block);
}

void Memory::end_work() {
    working_ = std::thread::id{};
    for (const auto& [begin, block] : blocks_) hide(begin, block);
}

void Memory::close() {
    if (mapping_) mapping_->close();
}

bool Memory::make_accessible(const void* address, bool writes) {
    if (!mapping_ || !mapping_->contains(address)) return false;
    const auto block = blocks_.lower_bound(static_cast<const char*>(address));
    if (working_ != std::this_thread::get_id()) {
        const std::string place =
            block_of(address) ? "byte " + std::to_string(static_cast<const char*>(address) - block->first) +
                                    " of " + std::to_string(block->second.bytes) + " of device " +
                                    std::to_string(block->second.device) + "'s memory"
                              : "device memory that was not allocated, or already freed";
        stop(std::string("the host ") + (writes ? "writes " : "reads ") + place +
             ", which only work in a stream may touch");
    }
    if (!block_of(address)) return false;
    mapping_->open();
    return true;
}

}  // namespace simt::runtime
