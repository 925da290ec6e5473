// Communication between ranks of the tests' NCCL: a local socket between every two ranks, however the
// processes were started. No function here blocks. It reports if it cannot go on, and is called again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
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

    // The number of bytes transferred: 0 if none can be now, `gone` if the peer is gone.
    std::ptrdiff_t write(const void* from, std::size_t bytes) const;
    std::ptrdiff_t read(void* to, std::size_t bytes, bool peek = false) const;
    static constexpr std::ptrdiff_t gone = -1;

  private:
    int descriptor_;
};

// Data that ranks exchange about themselves.
struct Hello {
    int rank, color, key;
    std::uint64_t process, host;  // unique among processes, among machines
    cudaUUID_t gpu;
};

// Connects all ranks that call with the same id.
class Mesh {
  public:
    Mesh(std::string id, const Hello& own, int size);

    // Progresses; returns true when all are connected.
    bool connect();
    std::string missing() const;
    const std::string& id() const { return id_; }

    std::vector<Hello> hellos;    // by rank
    std::vector<Socket> sockets;  // by rank; none to itself

  private:
    std::string id_;
    Hello own_;
    Socket listener_;
    std::vector<Socket> called_, answered_;  // their hello has not arrived
};

// Messages that are in flight together. Messages of one peer and direction arrive in the given order.
struct Message {
    int peer;
    bool receives;
    std::byte* data;
    std::size_t bytes;
    std::size_t done = 0;
};
struct Progress {
    bool is_through = true;   // all messages are transferred
    std::optional<int> gone;  // a peer that closed its end; what it had sent before is received
};
Progress exchange(const std::vector<Socket>& sockets, std::vector<Message>& messages);

}  // namespace simt::runtime
