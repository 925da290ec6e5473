// The operands of one call of an operation, in the device's memory, with checks.
//
// Results that are to be overwritten, and the workspace, hold NaN before the call. Operands that are only
// read must be unchanged after it. The memory around every operand must be untouched. A violation is reported
// as a ProgrammingError. (With the address sanitizer, reading around an operand ends the program.)
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cuda/workspace.h"
#include "llmc/device/device.h"
#include "llmc/device/ops.h"

namespace llmc::probe {

// The relative error of rounding to 16 bits; 0 for fp32, whose roundings tests count one by one.
inline double rounding_to(DType dtype) {
    return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::fp16 ? 0x1p-11 : 0.0;
}

// Numbers as fp64, which holds every fp32, bf16, fp16 and int32 exactly.
struct HostTensor {
    Shape shape;
    std::vector<double> values;
};
using HostTensors = std::map<std::string, HostTensor, std::less<>>;

inline std::vector<std::byte> encode(const std::vector<double>& values, DType dtype) {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    std::byte* at = bytes.data();
    const auto put = [&](auto value) {
        std::memcpy(at, &value, sizeof(value));
        at += sizeof(value);
    };
    for (const double x : values) {
        if (dtype == DType::fp32) put(static_cast<float>(x));
        if (dtype == DType::bf16) put(to_bfloat16(static_cast<float>(x)));
        if (dtype == DType::fp16) put(to_float16(static_cast<float>(x)));
        if (dtype == DType::fp64) put(x);
        if (dtype == DType::int32) put(static_cast<std::int32_t>(x));
        if (dtype == DType::uint8) put(static_cast<std::uint8_t>(x));
    }
    return bytes;
}

inline std::vector<double> decode(const std::vector<std::byte>& bytes, DType dtype) {
    std::vector<double> values(bytes.size() / size_of(dtype));
    const std::byte* from = bytes.data();
    const auto get = [&](auto value) {
        std::memcpy(&value, from, sizeof(value));
        from += sizeof(value);
        return value;
    };
    for (double& x : values) {
        if (dtype == DType::fp32) x = get(float{});
        if (dtype == DType::bf16) x = to_float(get(bfloat16{}));
        if (dtype == DType::fp16) x = to_float(get(float16{}));
        if (dtype == DType::fp64) x = get(double{});
        if (dtype == DType::int32) x = get(std::int32_t{});
        if (dtype == DType::uint8) x = get(std::uint8_t{});
    }
    return values;
}

// A tensor on the device between two guards. No operation may change them, nor read them if the address
// sanitizer is enabled.
class GuardedTensor {
  public:
    GuardedTensor(Device& device, DType dtype, const Shape& shape, const std::vector<std::byte>& content)
        : device_(device),
          bytes_(content.size()),
          memory_(device.allocate(bytes_ + 2 * guard_bytes, "op probe")),
          tensor_{memory_ + guard_bytes, dtype, shape} {
        check(tensor_.bytes() == bytes_, "a tensor is given with as many elements as its shape has");
        const std::vector<std::byte> guard(guard_bytes, guard_value);
        device.upload(front_guard(), guard.data());
        device.upload(tensor_, content.data());
        device.upload(back_guard(), guard.data());
        forbid_guards();
    }
    ~GuardedTensor() {
        permit_guards();
        device_.release(memory_);
    }
    GuardedTensor(const GuardedTensor&) = delete;
    GuardedTensor& operator=(const GuardedTensor&) = delete;

    const Tensor& tensor() const { return tensor_; }

    std::vector<std::byte> content() const {
        std::vector<std::byte> bytes(bytes_);
        device_.download(bytes.data(), tensor_);
        return bytes;
    }

    // After this call the guards may be read.
    bool guards_are_whole() const {
        permit_guards();
        std::vector<std::byte> guards(2 * guard_bytes);
        device_.download(guards.data(), front_guard());
        device_.download(guards.data() + guard_bytes, back_guard());
        return std::all_of(guards.begin(), guards.end(), [](std::byte b) { return b == guard_value; });
    }

  private:
    static constexpr std::size_t guard_bytes = buffer_alignment;  // keeps the tensor aligned
    static constexpr std::byte guard_value{0x5a};

    // As two-byte elements, because a bf16 tensor may end at any even byte.
    Tensor front_guard() const { return {memory_, DType::bf16, {guard_bytes / 2}}; }
    Tensor back_guard() const { return {memory_ + guard_bytes + bytes_, DType::bf16, {guard_bytes / 2}}; }

    // The address sanitizer checks the CPU's memory only.
    void forbid_guards() const {
#if defined(__SANITIZE_ADDRESS__)
        if (device_.kind() != DeviceKind::cpu) return;
        ASAN_POISON_MEMORY_REGION(memory_, guard_bytes);
        ASAN_POISON_MEMORY_REGION(memory_ + guard_bytes + bytes_, guard_bytes);
#endif
    }
    void permit_guards() const {
#if defined(__SANITIZE_ADDRESS__)
        if (device_.kind() != DeviceKind::cpu) return;
        ASAN_UNPOISON_MEMORY_REGION(memory_, bytes_ + 2 * guard_bytes);
#endif
    }

    Device& device_;
    std::size_t bytes_;
    std::byte* memory_;
    Tensor tensor_;
};

// The workspace of many calls, one after another. Each finds NaN in it, except in the part of a GPU's matrix products,
// which is large.
class Workspace {
  public:
    explicit Workspace(Device& device)
        : device_(device), kept_(device.kind() == DeviceKind::cuda ? cuda::product_workspace_bytes : 0) {}

    Tensor prepare(std::size_t bytes) {
        if (!memory_ || memory_->tensor().bytes() < bytes) {
            memory_.reset();
            memory_.emplace(device_, DType::uint8, Shape{static_cast<std::int64_t>(bytes)},
                            std::vector(bytes, std::byte{0xff}));
        } else if (bytes > kept_) {
            const std::vector<std::byte> garbage(bytes - kept_, std::byte{0xff});
            device_.upload(memory_->tensor().flat(static_cast<std::int64_t>(kept_), std::ssize(garbage)),
                           garbage.data());
        }
        return memory_->tensor();
    }
    bool guards_are_whole() const { return !memory_ || memory_->guards_are_whole(); }

  private:
    Device& device_;
    std::size_t kept_;
    std::optional<GuardedTensor> memory_;
};

// Built from the inputs of a call, with the names and dtypes of ops.h. Throws a UserError if an input is
// missing or holds a number that its dtype cannot represent.
class Operands {
  public:
    Operands(Device& device, DType dtype, const HostTensors& inputs, Workspace& workspace)
        : X(dtype), device_(device), inputs_(inputs), workspace_(workspace) {}

    const DType X;  // the compute dtype

    bool has(std::string_view name) const { return inputs_.contains(name); }
    const Shape& shape(std::string_view name) const { return host(name).shape; }
    const std::vector<double>& values(std::string_view name) const { return host(name).values; }

    double scalar(std::string_view name) const {
        if (values(name).size() != 1) user_error("the input {} is not one number", name);
        return values(name)[0];
    }
    bool flag(std::string_view name) const { return has(name) && scalar(name) != 0; }

    // Read and not changed by the operation.
    Tensor in(std::string_view name, DType dtype) { return add(name, Role::read, dtype); }
    // Read and changed.
    Tensor in_out(std::string_view name, DType dtype) { return add(name, Role::written, dtype); }
    // Absent if the input is.
    Tensor in_if_given(std::string_view name, DType dtype) { return has(name) ? in(name, dtype) : Tensor{}; }
    Tensor in_out_if_given(std::string_view name, DType dtype) {
        return has(name) ? in_out(name, dtype) : Tensor{};
    }
    // Overwritten.
    Tensor out(std::string_view name, DType dtype, const Shape& shape) {
        return add(name, Role::written, dtype, shape, garbage(dtype, shape));
    }
    // Overwritten, but not a result of the call.
    Tensor scratch(std::string_view name, DType dtype, const Shape& shape) {
        return add(name, Role::scratch, dtype, shape, garbage(dtype, shape));
    }

    void provide_workspace(const WorkspaceRequest& request) {
        device_.ops().set_workspace(workspace_.prepare(device_.sizes().workspace_bytes(request)));
    }

    // Everything that the operation wrote. Must be called once, after the operation.
    HostTensors results() {
        device_.synchronize();
        device_.ops().set_workspace({});
        if (!workspace_.guards_are_whole()) programming_error("the operation wrote outside of the workspace");
        HostTensors results;
        for (const Operand& operand : operands_) {
            if (!operand.memory.guards_are_whole())
                programming_error(fmt::format("the operation wrote outside of {}", operand.name));
            if (operand.role == Role::scratch) continue;
            const auto content = operand.memory.content();
            if (operand.role == Role::read && content != operand.before)
                programming_error(fmt::format("the operation changed {}, which it only reads", operand.name));
            const Tensor& tensor = operand.memory.tensor();
            if (operand.role == Role::written)
                results[operand.name] = {tensor.shape, decode(content, tensor.dtype)};
        }
        return results;
    }

  private:
    enum class Role { read, written, scratch };
    struct Operand {
        std::string name;
        Role role;
        std::vector<std::byte> before;
        GuardedTensor memory;

        Operand(std::string_view given_name, Role given_role, std::vector<std::byte> content, Device& device,
                DType dtype, const Shape& shape)
            : name(given_name),
              role(given_role),
              before(std::move(content)),
              memory(device, dtype, shape, before) {}
    };

    const HostTensor& host(std::string_view name) const {
        const auto found = inputs_.find(name);
        if (found == inputs_.end()) user_error("the input {} is missing", name);
        return found->second;
    }

    // NaN in every floating-point dtype, -1 in int32.
    static std::vector<std::byte> garbage(DType dtype, const Shape& shape) {
        return std::vector(static_cast<std::size_t>(shape.elements()) * size_of(dtype), std::byte{0xff});
    }

    Tensor add(std::string_view name, Role role, DType dtype) {
        const std::vector<double>& given = values(name);
        std::vector<std::byte> bytes = encode(given, dtype);
        const std::vector<double> stored = decode(bytes, dtype);
        for (std::size_t i = 0; i < given.size(); ++i)
            if (stored[i] != given[i] && !std::isnan(given[i]))
                user_error("the input {} holds {}, which is not {}", name, given[i], name_of(dtype));
        return add(name, role, dtype, shape(name), std::move(bytes));
    }

    Tensor add(std::string_view name, Role role, DType dtype, const Shape& shape,
               std::vector<std::byte> bytes) {
        return operands_.emplace_back(name, role, std::move(bytes), device_, dtype, shape).memory.tensor();
    }

    Device& device_;
    const HostTensors& inputs_;
    Workspace& workspace_;
    std::deque<Operand> operands_;  // growing does not move its elements
};

}  // namespace llmc::probe
