// A device: memory, copies, and the operations (ops.h). The CPU device is device/cpu; the rest of the program
// knows only this contract.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"

namespace llmc {

class Ops;
class Queues;

enum class DeviceKind { cpu, cuda };

// The device stopped: the line says what it answered to which call. A kernel that did something wrong is reported by
// whatever call comes next.
class DeviceFault : public UserError {
  public:
    using UserError::UserError;
};

// Memory of the host, freed with its owner.
using HostMemory = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

class Device {
  public:
    virtual ~Device() = default;

    virtual DeviceKind kind() const = 0;
    // For the header: what it is ("AMD EPYC, 2 threads"), and what a person should know of how it computes in
    // a dtype ("bf16 products in fp32: this processor has none of its own"), empty if nothing.
    virtual std::string description() const = 0;
    virtual std::string note(DType dtype) const = 0;

    // Bytes that may be allocated now, by all processes on this device together; 0 where it is not known.
    virtual std::size_t available_memory() const = 0;
    // Floating-point operations a second that the maker promises for products of this dtype; nothing where that
    // is not known, as of processors, whose clock no one promises.
    virtual std::optional<double> peak_flops(DType dtype) const = 0;

    // Tokens of a micro-batch that fill the device.
    virtual std::int64_t usual_tokens() const = 0;
    // Logits that are worth holding at once: their products read and write the embedding's whole gradient each time.
    virtual std::int64_t usual_logits_bytes() const = 0;

    // Zeroed memory, aligned to buffer_alignment. A UserError names the arena and the bytes if there is too
    // little.
    virtual std::byte* allocate(std::size_t bytes, std::string_view arena) = 0;
    virtual void release(std::byte* memory) = 0;  // null is allowed

    // Null where all that the device is given is done when the call returns.
    virtual Queues* queues() { return nullptr; }

    // Between host memory and the device's; same dtype and number of elements on both sides. With queues an upload
    // from host_memory() is queued, and its source must stay as it is until it is done; other sources are read at
    // once. A download waits for what the selected queue holds.
    virtual void upload(const Tensor& to_device, const void* from_host) = 0;
    virtual void download(void* to_host, const Tensor& from_device) = 0;
    // Of which uploads are queued.
    virtual HostMemory host_memory(std::size_t bytes) = 0;
    // Waits until all work given to the device is done.
    virtual void synchronize() = 0;

    virtual Ops& ops() = 0;

    // What the device chose by measuring (which of several algorithms computes a product): a text that another
    // process, or a later run on the same kind of device, gives to adopt_choices, so that both compute the same bits.
    // Its first line names the kind of device and the libraries; then a line for each choice: what it is for, a
    // colon, the choice. Empty where nothing is chosen. To adopt are as many such texts as there are, with an empty line
    // between; those of other kinds are passed over, and the last for the same counts.
    virtual std::string choices() const { return {}; }
    virtual void adopt_choices(std::string_view /*choices*/) {}
    // While it measures, operations of a shape that it has not met yet are timed and chosen; otherwise the first
    // algorithm serves.
    virtual void measure(bool /*on*/) {}

    // Bytes of the device's memory that are taken now, by all processes; 0 where that is not known.
    virtual std::size_t memory_taken() const { return 0; }
    // For the header: memory that is taken beside the arenas ("CUDA's context 0.5 GiB"), a communicator's, so many
    // bytes, among it. Empty if none.
    virtual std::string memory_beside_arenas(std::size_t /*of_communicator*/) const { return {}; }
};

// `threads` 0: as many as OMP_NUM_THREADS says, or else the cores this process may use.
std::unique_ptr<Device> make_cpu_device(int threads = 0);

}  // namespace llmc
