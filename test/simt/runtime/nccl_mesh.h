// How ranks of the tests' NCCL talk: a local socket between every two of them, whatever started the processes. Nothing
// here blocks: what cannot go on says so, and is called again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace simt::runtime {

// A peer closed its end, or its process ended.
class PeerGone : public std::runtime_error {
  public:
    explicit PeerGone(int rank) : std::runtime_error("rank " + std::to_string(rank) + " is gone") {}
};

class Socket {
  public:
    explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
    ~Socket();
    Socket(Socket&& other) noexcept;
    Socket& operator=(Socket&& other) noexcept;

    explicit operator bool() const { return descriptor_ >= 0; }
    int descriptor() const { return descriptor_; }

    // Bytes that went, 0 where none can now; nothing where the peer is gone.
    std::ptrdiff_t write(const void* from, std::size_t bytes) const;
    std::ptrdiff_t read(void* to, std::size_t bytes, bool leave = false) const;
    static constexpr std::ptrdiff_t gone = -1;

  private:
    int descriptor_;
};

// What ranks know of each other.
struct Hello {
    int rank, color, key;
    std::uint64_t process, host;  // numbers that no other process, machine has
    cudaUUID_t gpu;
};

// Connects all ranks that call with the same id.
class Mesh {
  public:
    Mesh(std::string id, const Hello& own, int size);

    // Goes on; true once all are connected.
    bool connect();
    std::string missing() const;
    const std::string& id() const { return id_; }

    std::vector<Hello> hellos;    // by rank
    std::vector<Socket> sockets;  // by rank, none to itself

  private:
    std::string id_;
    Hello own_;
    Socket listener_;
    std::vector<Socket> called_, answered_;  // whose hello has not come
};

// Messages that are under way together. Those of one peer and direction arrive in the order they were given.
struct Message {
    int peer;
    bool receives;
    std::byte* data;
    std::size_t bytes;
    std::size_t done = 0;
};
// Goes on; true once all are through. Throws PeerGone.
bool exchange(const std::vector<Socket>& sockets, std::vector<Message>& messages);

}  // namespace simt::runtime
