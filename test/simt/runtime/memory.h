// The memory of the tests' CUDA runtime. Each allocation is a heap block of exactly its size, so that
// AddressSanitizer finds accesses past its end and after its release. New memory holds 0xff bytes, which are
// NaN in every floating-point type.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>

namespace simt::runtime {

// Ends the process with "simt: " and the message.
[[noreturn]] void stop(const std::string& message);

struct Block {
    std::size_t bytes;
    int device;  // or `pinned`
    static constexpr int pinned = -1;
};

class Memory {
  public:
    // `device` or Block::pinned. The address is a multiple of 256.
    void* allocate(std::size_t bytes, int device);
    // The block must begin at this address.
    void release(void* begin);
    void release_all();

    // The block that contains the address; null for the host's own memory.
    const Block* block_of(const void* address) const;
    // Whether a range lies within one block, or completely outside of all.
    bool is_one_piece(const void* begin, std::size_t bytes) const;
    bool begins_block(const void* address) const;

    std::size_t used(int device) const;
    std::size_t blocks() const { return blocks_.size(); }

    // With AddressSanitizer, the host may not touch device memory; only work in a stream may.
    void show_device_memory() const;
    void hide_device_memory() const;

  private:
    std::map<const char*, Block, std::greater<>> blocks_;  // by their first address
};

}  // namespace simt::runtime
