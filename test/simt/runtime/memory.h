// The memory of the tests' CUDA runtime. The host may not touch a device's memory, only work in a stream may; new
// memory holds 0xff bytes, which are NaN in every floating-point type.
//
// With AddressSanitizer each allocation is a heap block of exactly its size, so that it finds accesses past its end and
// after its release, and those of the host. Otherwise a device's blocks lie in one mapping, which is closed. The first
// access of work opens it; it is closed again before the host goes on.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

namespace simt::runtime {

// Ends the process with "simt: " and the message.
[[noreturn]] void stop(const std::string& message);

struct Block {
    std::size_t bytes;
    int device;  // or `pinned`
    static constexpr int pinned = -1;
};

// The mapping of all devices' memory. Blocks begin at multiples of 256.
class DeviceMapping {
  public:
    DeviceMapping();
    char* allocate(std::size_t bytes);
    void release(char* begin, std::size_t bytes);
    bool contains(const void* address) const;
    void open();
    void close();

  private:
    char* begin_;
    std::size_t used_ = 0, opened_ = 0;          // bytes from the beginning
    std::map<std::size_t, std::size_t> free_{};  // bytes of each gap, by its place
};

class Memory {
  public:
    Memory();
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

    // Work runs on this thread, and may touch device memory; before the host goes on, or a host function, the memory is
    // closed.
    void begin_work();
    void end_work();
    void close();

    // Whether work touched a closed device's memory, which is now open. Ends the process if the host did.
    bool make_accessible(const void* address, bool writes);

  private:
    std::map<const char*, Block, std::greater<>> blocks_;  // by their first address
    std::unique_ptr<DeviceMapping> mapping_{};             // null: heap blocks
    std::atomic<std::thread::id> working_{};
};

}  // namespace simt::runtime
