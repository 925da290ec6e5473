// A device: memory, copies, streams, and the operations (ops.h). The CPU device is in device/cpu, the GPU
// device in device/cuda. The rest of the program knows only this interface.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"

namespace llmc {

class DeviceSizes;
class Ops;

enum class DeviceKind { cpu, cuda };

// Operations run in `compute`. Communication between ranks has its own stream, so that it need not wait for
// operations. Transfers between pipeline stages have a stream per kind and direction, so that none waits for
// another. `copy` copies the next batch; what is offloaded goes to the device and comes from it on two more. The host's
// own work has streams too: its updates, and the reads and writes of a disk.
enum class StreamKind {
    compute,
    communication,
    activations_in,
    activations_out,
    gradients_in,
    gradients_out,
    copy,
    to_device,
    from_device,
    host,
    disk_in,
    disk_out
};
inline constexpr std::array all_streams = {StreamKind::compute,        StreamKind::communication,
                                           StreamKind::activations_in, StreamKind::activations_out,
                                           StreamKind::gradients_in,   StreamKind::gradients_out,
                                           StreamKind::copy,           StreamKind::to_device,
                                           StreamKind::from_device,    StreamKind::host,
                                           StreamKind::disk_in,        StreamKind::disk_out};
// Those that a device may have.
inline constexpr std::span<const StreamKind> device_streams =
    std::span(all_streams).first<static_cast<std::size_t>(StreamKind::host)>();
inline constexpr bool is_of_host(StreamKind stream) { return stream >= StreamKind::host; }
std::string_view name_of(StreamKind stream);

// The streams of an asynchronous device. Work in one stream runs in order. Streams run concurrently, except
// for the waits below. The CPU device has no streams: each call finishes before it returns.
class Streams {
  public:
    virtual ~Streams() = default;

    // Work that the host submits from now on goes to this stream: operations, copies and communication.
    virtual void select(StreamKind stream) = 0;

    // Create an event, which can be recorded again and again. Only a timed one has a time.
    virtual int new_event() = 0;
    virtual int new_timed_event() = 0;
    // Records the event after all work that is in the selected stream now.
    virtual void record(int event) = 0;
    // Work submitted to the selected stream from now on waits for the last record of `event`.
    virtual void wait(int event) = 0;
    // The host waits for the event.
    virtual void wait_on_host(int event) = 0;

    // The milliseconds from one timed event to another; both must be complete.
    virtual double milliseconds(int from, int to) = 0;
};

// Reports that the device failed. The message names the call and the error that the device returned. The next
// call after a faulty kernel reports that kernel's error.
class DeviceFault : public UserError {
  public:
    using UserError::UserError;
};

// The algorithms that libraries offered and that are not used: they did not run, or gave other bits each time.
struct LeftOut {
    std::int64_t failing = 0, varying = 0;
};

// Host memory that is freed with its owner.
using HostMemory = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

class Device {
  public:
    virtual ~Device() = default;

    virtual DeviceKind kind() const = 0;
    // Lines for the header that a run prints. `description` names the device ("AMD EPYC, 2 threads"). `note`
    // says how it computes in a dtype ("bf16 products are computed in fp32: this processor has no bf16
    // instructions"), or is empty.
    virtual std::string description() const = 0;
    virtual std::string note(DType dtype) const = 0;

    // Bytes that all processes on this device together may allocate now; 0 if unknown.
    virtual std::size_t available_memory() const = 0;
    // Peak floating-point operations per second that the maker states for products of this dtype. Empty if
    // unknown, as for CPUs, whose clock rate is not guaranteed.
    virtual std::optional<double> peak_flops(DType dtype) const = 0;

    // Allocates zeroed memory, aligned to buffer_alignment. If there is too little memory, throws a UserError
    // that names the arena and the bytes.
    virtual std::byte* allocate(std::size_t bytes, std::string_view arena) = 0;
    virtual void release(std::byte* memory) = 0;  // null is allowed

    // Null for a device that finishes each call before it returns.
    virtual Streams* streams() { return nullptr; }
    // The device whose memory is the host's: the CPU device itself, and that beside a GPU.
    virtual Device& host() = 0;

    // Copy between host memory and device memory; both sides have the same dtype and number of elements. With
    // streams, an upload from host_memory() is asynchronous: the source must not change until the copy is
    // done. Other sources are read before the call returns. A download waits for the work in the selected
    // stream.
    virtual void upload(const Tensor& to_device, const void* from_host) = 0;
    virtual void download(void* to_host, const Tensor& from_device) = 0;
    // Queues a download to host_memory() on the selected stream; without streams it is done at once.
    virtual void begin_download(void* to_host_memory, const Tensor& from_device) = 0;
    // Allocates host memory for asynchronous copies. If there is too little, throws a UserError.
    virtual HostMemory host_memory(std::size_t bytes) = 0;
    // Waits until the device has done all its work.
    virtual void synchronize() = 0;

    virtual Ops& ops() = 0;
    // For the plan of a run.
    virtual const DeviceSizes& sizes() const = 0;

    // The choices that the device made by measuring, such as the algorithm of each matrix product. Another
    // process, or a later run on the same kind of device, passes the text to adopt_choices(); both then
    // compute the same bits. The first line names the kind of device and the libraries. Each further line is
    // a choice: its subject, a colon, the choice. Empty if nothing is chosen.
    // A text for adopt_choices() may join any number of these, with an empty line between two. Those of other
    // kinds of device are ignored. If several choices have the same subject, the last one counts.
    virtual std::string choices() const { return {}; }
    virtual void adopt_choices(std::string_view /*choices*/) {}
    // Turns autotuning on or off. When on, the device times the algorithms for each new shape, on what is in memory,
    // and keeps the fastest that gives the same bits each time. When off, a new shape uses the first that runs.
    virtual void set_autotuning(bool /*on*/) {}
    virtual LeftOut left_out() const { return {}; }
    // When on, operations but matrix products compute nothing: they load their code, which a first call otherwise
    // does, and may wait for all work of the device meanwhile.
    virtual void set_loading(bool /*on*/) {}

    // Bytes of device memory that all processes use now; 0 if unknown.
    virtual std::size_t memory_taken() const { return 0; }
    // For the header that a run prints: the memory used outside the arenas ("CUDA's context 0.5 GiB"),
    // including the `communicator_bytes` bytes. Empty if there is none.
    virtual std::string memory_beside_arenas(std::size_t /*communicator_bytes*/) const { return {}; }
};

// If `threads` is 0, the number is OMP_NUM_THREADS. If that is not set, it is the number of cores that this
// process may use.
std::unique_ptr<Device> make_cpu_device(int threads = 0);

// Restarts the program with OMP_WAIT_POLICY=passive, unless a wait policy is set already. Without it, threads
// of GNU OpenMP spin at the end of each parallel loop until the last one arrives. On a busy machine the last
// one may wait for a core on which another spins; a step then takes a hundred times as long. Waking sleeping
// threads costs microseconds. With brief_loops, which take no longer themselves, threads of GNU OpenMP spin for some
// 20 microseconds before they sleep. The library reads its setting before main(), so a restart is needed.
void let_waiting_threads_sleep(char** argv, bool brief_loops = false);

// Copy between fp32 numbers on the host and a tensor of a compute dtype with as many elements: rounded to nearest,
// and widened.
void upload_rounded(Device& device, const Tensor& to, std::span<const float> from);
void download_widened(Device& device, std::span<float> to, const Tensor& from);

// The memory of a MemoryLayout on a device and beside it: one allocation per arena, made once and zeroed. The
// destructor frees it. UserError if there is too little; only a copy for checkpoints may then be absent.
class Arenas {
  public:
    Arenas(Device& device, MemoryLayout layout);
    ~Arenas();
    Arenas(const Arenas&) = delete;
    Arenas& operator=(const Arenas&) = delete;

    Tensor operator[](BufferId id) const;
    bool has_copy() const;
    // The copy is not used.
    void release_copy();
    const MemoryLayout& layout() const { return layout_; }

  private:
    void allocate(ArenaKind kind);

    Device& device_;
    MemoryLayout layout_;
    std::array<std::byte*, all_arenas.size()> memory_{};
    std::array<HostMemory, all_arenas.size()> host_memory_{};
    std::array<std::byte*, all_arenas.size()> of_host_{};  // the first bytes, at whole blocks of a disk
};

}  // namespace llmc
