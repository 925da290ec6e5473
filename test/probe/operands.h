// The operands of one call of an operation (llmc/device/ops.h), in the device's memory, with checks.
//
// Results that are to be overwritten, and the workspace, hold NaN before the call. Operands that are only
// read must be unchanged after it. The memory around every operand must be untouched. A violation is reported
// as a ProgrammingError. (With the address sanitizer, reading around an operand ends the program.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/memory_layout.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cuda/workspace.h"
#include "llmc/device/device.h"
#include "llmc/device/ops.h"

// The address sanitizer's functions; null in a program without it.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void*, std::size_t);    // NOLINT
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, std::size_t);  // NOLINT
}

namespace llmc::probe {

// Numbers as fp64, which holds every fp32, bf16, fp16 and int32 exactly. `dtype`: of an operand that may have several.
struct HostTensor {
    Shape shape;
    std::vector<double> values;
    std::optional<DType> dtype{};
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
    // It begins at a multiple of 256 bytes, or `behind` bytes after one.
    GuardedTensor(Device& device, DType dtype, const Shape& shape, const std::vector<std::byte>& content,
                  std::size_t behind = 0)
        : device_(device),
          bytes_(content.size()),
          guard_(has_red_zones(device) && bytes_ > 0 ? 0 : guard_bytes),
          front_(guard_ + behind),
          memory_(device.allocate(front_ + bytes_ + guard_, "op probe")),
          tensor_{memory_ + front_, dtype, shape} {
        check(tensor_.bytes() == bytes_, "a tensor is given with as many elements as its shape has");
        const std::vector<std::byte> guard(front_, guard_value);
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
        std::vector<std::byte> guards(front_ + guard_);
        device_.download(guards.data(), front_guard());
        device_.download(guards.data() + front_, back_guard());
        return std::all_of(guards.begin(), guards.end(), [](std::byte b) { return b == guard_value; });
    }

  private:
    static constexpr std::size_t guard_bytes = buffer_alignment;  // keeps the tensor aligned
    static constexpr std::byte guard_value{0x5a};

    Tensor front_guard() const { return {memory_, DType::uint8, {static_cast<std::int64_t>(front_)}}; }
    Tensor back_guard() const {
        return {memory_ + front_ + bytes_, DType::uint8, {static_cast<std::int64_t>(guard_)}};
    }

    // With the address sanitizer, each allocation of a simulated GPU has red zones.
    static bool has_red_zones(Device& device) {
        return __asan_poison_memory_region && device.kind() == DeviceKind::cuda;
    }
    void forbid_guards() const {
        if (!__asan_poison_memory_region || has_red_zones(device_)) return;
        __asan_poison_memory_region(memory_, front_);
        __asan_poison_memory_region(memory_ + front_ + bytes_, guard_);
    }
    void permit_guards() const {
        if (!__asan_poison_memory_region || has_red_zones(device_)) return;
        __asan_unpoison_memory_region(memory_, front_ + bytes_ + guard_);
    }

    Device& device_;
    std::size_t bytes_, guard_, front_;  // of the tensor, of a guard, and of all before the tensor
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

// The fields of an operation, from inputs with their names:
//   x          an operand, or a number, or the numbers of a struct
//   x_heads    first, count and size of heads in the rows x
//   x=y        x is the operand y, as in place
// An operand that is not given is absent, unless it is a result: then it begins as garbage. Numbers that are not given
// are 0, or what the struct says. Throws a UserError if an input is no field, or holds a number that its dtype cannot
// represent.
class Operands {
  public:
    // With `misaligned`, each operand begins one element behind a multiple of 256 bytes.
    Operands(Device& device, DType X, const HostTensors& inputs, const HostTensors& results,
             Workspace& workspace, bool misaligned = false)
        : device_(device),
          X_(X),
          misaligned_(misaligned),
          inputs_(inputs),
          results_(results),
          workspace_(workspace) {}

    // Leaves out the results `without`.
    template <class O>
    void fill(O& op, const std::vector<std::string>& without = {}) {
        const auto for_each = [&](const auto& f) {
            op.fields([&](const auto&... field) { (f(field), ...); });
        };
        for_each([&](const auto& field) { fill_field(field, without); });
        for_each([&](const auto& field) { fill_alias(field, without); });
        for (const auto& [name, _] : inputs_)
            if (!used_.contains(name)) user_error("{} has no field for the input {}", O::name, name);
        if constexpr (requires { op.workspace(); })
            device_.ops().set_workspace(workspace_.prepare(device_.sizes().workspace_bytes(op.workspace())));
    }

    // Everything that the operation wrote. Must be called once, after the operation.
    HostTensors results() {
        device_.synchronize();
        device_.ops().set_workspace({});
        if (!workspace_.guards_are_whole()) programming_error("the operation wrote outside of the workspace");
        HostTensors results;
        for (auto& [name, operand] : operands_) {
            if (!operand.memory.guards_are_whole())
                programming_error(fmt::format("the operation wrote outside of {}", name));
            const auto content = operand.memory.content();
            const Tensor& tensor = operand.memory.tensor();
            if (operand.result.empty()) {
                if (content != operand.before)
                    programming_error(fmt::format("the operation changed {}, which it only reads", name));
            } else {
                results[operand.result] = {tensor.shape, decode(content, tensor.dtype), tensor.dtype};
            }
        }
        return results;
    }

  private:
    struct Operand {
        std::vector<std::byte> before;
        GuardedTensor memory;
        std::string result;  // its name; empty: the operation only reads it

        Operand(std::vector<std::byte> content, Device& device, DType dtype, const Shape& shape,
                std::size_t behind)
            : before(std::move(content)), memory(device, dtype, shape, before, behind) {}
    };

    const HostTensor* find(const HostTensors& tensors, std::string_view name) {
        const auto found = tensors.find(name);
        if (found == tensors.end()) return nullptr;
        if (&tensors == &inputs_) used_.insert(found->first);
        return &found->second;
    }

    // The input "x=y" of a field x.
    HostTensors::const_iterator alias_of(std::string_view name) const {
        const std::string start = std::string(name) + "=";
        const auto found = inputs_.lower_bound(start);
        return found != inputs_.end() && found->first.starts_with(start) ? found : inputs_.end();
    }

    // fields() has constant references to the fields of an operation that is not constant.
    template <class T>
    static void set(const T& field, const T& value) {
        const_cast<T&>(field) = value;
    }
    void place(const OperandField<Tensor>& field, const Tensor& tensor) { set(field.operand, tensor); }
    void place(const OperandField<Heads>& field, const Tensor& rows) {
        const HostTensor* numbers = find(inputs_, std::string(field.name) + "_heads");
        if (!numbers || numbers->values.size() != 3)
            user_error("{}_heads is not first, count, size", field.name);
        const auto number = [&](std::size_t i) { return static_cast<std::int64_t>(numbers->values[i]); };
        set(field.operand, {rows, number(0), number(1), number(2)});
    }

    template <class T>
    void fill_field(const OperandField<T>& field, const std::vector<std::string>& without) {
        if (alias_of(field.name) != inputs_.end()) return;
        const HostTensor *given = find(inputs_, field.name), *result = find(results_, field.name);
        const bool writes = field.access != Access::read;
        if (std::ranges::find(without, field.name) != without.end()) {
            find(inputs_, std::string(field.name) + "_heads");
            return;
        }
        if (!given && !(writes && result)) return;
        if (!given && field.access == Access::add) user_error("the input {} is missing", field.name);
        const HostTensor& like = given ? *given : *result;
        const DType dtype = field.dtype.fixed ? *field.dtype.fixed : like.dtype.value_or(X_);
        const auto [made, _] = operands_.try_emplace(
            std::string(field.name), given ? encoded(field.name, *given, dtype) : garbage(dtype, like.shape),
            device_, dtype, like.shape, misaligned_ ? size_of(dtype) : 0);
        if (writes) made->second.result = field.name;
        place(field, made->second.memory.tensor());
    }
    template <class T>
    void fill_field(const NumberField<T>& field, const std::vector<std::string>& /*without*/) {
        if (const HostTensor* given = find(inputs_, field.name))
            set(field.value, number<T>(field.name, given->values));
    }

    template <class T>
    void fill_alias(const OperandField<T>& field, const std::vector<std::string>& without) {
        const auto given = alias_of(field.name);
        if (given == inputs_.end()) return;
        used_.insert(given->first);
        const auto source = operands_.find(given->first.substr(field.name.size() + 1));
        if (source == operands_.end()) user_error("there is no operand for {}", given->first);
        if (std::ranges::find(without, field.name) != without.end()) {
            find(inputs_, std::string(field.name) + "_heads");
            return;
        }
        if (field.access != Access::read && source->second.result.empty()) source->second.result = field.name;
        place(field, source->second.memory.tensor());
    }
    template <class T>
    void fill_alias(const NumberField<T>& /*field*/, const std::vector<std::string>& /*without*/) {}

    template <class T>
    T number(std::string_view name, const std::vector<double>& values) {
        const auto integer = [&](std::size_t i) { return static_cast<std::int64_t>(values.at(i)); };
        if constexpr (std::is_same_v<T, StochasticRounding>) {
            if (values.size() != 2) user_error("the input {} is not a seed and the first element", name);
            return {.seed = static_cast<std::uint64_t>(integer(0)), .first_element = integer(1)};
        } else if constexpr (std::is_same_v<T, decltype(UpdateStep::numbers)>) {
            T numbers{};
            if (values.size() > numbers.size()) user_error("the input {} has too many numbers", name);
            std::ranges::copy(values, numbers.begin());
            return numbers;
        } else if constexpr (requires { typename T::value_type; } &&
                             !std::is_same_v<T, std::span<const UpdateSegment>>) {
            return number<typename T::value_type>(name, values);
        } else if constexpr (std::is_same_v<T, std::span<const UpdateSegment>>) {
            if (values.size() % 5 != 0)
                user_error("the input {} is not begin, end, decay, in_packed, factor", name);
            for (std::size_t i = 0; i < values.size(); i += 5)
                segments_.push_back(
                    {integer(i), integer(i + 1), values[i + 2], integer(i + 3), values[i + 4]});
            return segments_;
        } else {
            if (values.size() != 1) user_error("the input {} is not one number", name);
            if constexpr (std::is_same_v<T, bool>) return values[0] != 0;
            return static_cast<T>(values[0]);
        }
    }

    // NaN in every floating-point dtype, -1 in int32.
    static std::vector<std::byte> garbage(DType dtype, const Shape& shape) {
        return std::vector(static_cast<std::size_t>(shape.elements()) * size_of(dtype), std::byte{0xff});
    }
    static std::vector<std::byte> encoded(std::string_view name, const HostTensor& given, DType dtype) {
        std::vector<std::byte> bytes = encode(given.values, dtype);
        const std::vector<double> stored = decode(bytes, dtype);
        for (std::size_t i = 0; i < stored.size(); ++i)
            if (stored[i] != given.values[i] && !std::isnan(given.values[i]))
                user_error("the input {} holds {}, which is not {}", name, given.values[i], name_of(dtype));
        return bytes;
    }

    Device& device_;
    DType X_;
    bool misaligned_;
    const HostTensors &inputs_, &results_;
    Workspace& workspace_;
    std::map<std::string, Operand, std::less<>> operands_;
    std::set<std::string, std::less<>> used_;  // inputs
    std::vector<UpdateSegment> segments_;
};

}  // namespace llmc::probe
