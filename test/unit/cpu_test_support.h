// Shared by the tests of the CPU's operations: tensors that own their memory, operations with a workspace,
// and comparison with a double-precision reference within a bound for each element.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "llmc/core/random.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/products.h"

namespace llmc::cpu_test {

// Unit roundoff u: rounding to nearest changes x by at most u |x|.
inline constexpr double u32 = 0x1p-24;
inline double roundoff(DType dtype) {
    return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::fp16 ? 0x1p-11 : u32;
}

// A tensor that owns exactly as much memory as its size, so that the address sanitizer sees accesses past its
// ends.
class OwnedTensor {
  public:
    OwnedTensor(DType dtype, const Shape& shape)
        : memory_(static_cast<std::size_t>(shape.elements()) * size_of(dtype)),
          tensor_{memory_.data(), dtype, shape} {}
    OwnedTensor(OwnedTensor&&) = default;
    OwnedTensor& operator=(OwnedTensor&&) = default;

    operator const Tensor&() const { return tensor_; }
    const Tensor& operator*() const { return tensor_; }
    const Tensor* operator->() const { return &tensor_; }
    const std::vector<std::byte>& bytes() const { return memory_; }

    double get(std::int64_t i) const {
        switch (tensor_.dtype) {
            case DType::fp32:
                return tensor_.as<float>()[i];
            case DType::bf16:
                return to_float(tensor_.as<bfloat16>()[i]);
            case DType::fp16:
                return to_float(tensor_.as<float16>()[i]);
            case DType::fp64:
                return tensor_.as<double>()[i];
            case DType::int32:
                return tensor_.as<std::int32_t>()[i];
            case DType::uint8:
                return tensor_.as<std::uint8_t>()[i];
        }
        return 0.0;
    }
    void set(std::int64_t i, double value) {
        switch (tensor_.dtype) {
            case DType::fp32:
                tensor_.as<float>()[i] = static_cast<float>(value);
                break;
            case DType::bf16:
                tensor_.as<bfloat16>()[i] = to_bfloat16(static_cast<float>(value));
                break;
            case DType::fp16:
                tensor_.as<float16>()[i] = to_float16(static_cast<float>(value));
                break;
            case DType::fp64:
                tensor_.as<double>()[i] = value;
                break;
            case DType::int32:
                tensor_.as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
                break;
            case DType::uint8:
                tensor_.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(value);
                break;
        }
    }
    std::vector<double> values() const {
        std::vector<double> v;
        for (std::int64_t i = 0; i < tensor_.elements(); ++i) v.push_back(get(i));
        return v;
    }

  private:
    std::vector<std::byte> memory_;
    Tensor tensor_;
};

inline OwnedTensor filled(DType dtype, const Shape& shape, double value) {
    OwnedTensor t(dtype, shape);
    for (std::int64_t i = 0; i < t->elements(); ++i) t.set(i, value);
    return t;
}

// Contents that an operation must overwrite.
inline OwnedTensor garbage(DType dtype, const Shape& shape) { return filled(dtype, shape, NAN); }

// Normal numbers of the given mean and standard deviation. The same name gives the same numbers.
inline OwnedTensor normal(DType dtype, const Shape& shape, const std::string& name, double deviation = 1.0,
                          double mean = 0.0) {
    OwnedTensor t(dtype, shape);
    const RandomStream random(1, name);
    for (std::int64_t i = 0; i < t->elements(); ++i) {
        t.set(i, mean + deviation * random.normal(static_cast<std::uint64_t>(i)));
    }
    return t;
}

// Integers in [low, high)
inline OwnedTensor integers(const Shape& shape, const std::string& name, std::int64_t low,
                            std::int64_t high) {
    OwnedTensor t(DType::int32, shape);
    const RandomStream random(1, name);
    for (std::int64_t i = 0; i < t->elements(); ++i) {
        t.set(i, static_cast<double>(
                     low + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(i),
                                                                  static_cast<std::uint64_t>(high - low)))));
    }
    return t;
}

inline OwnedTensor copy(const OwnedTensor& from) {
    OwnedTensor to(from->dtype, from->shape);
    if (from->bytes() > 0) std::memcpy(to->data, from->data, from->bytes());
    return to;
}

// How the operations compute: the dtype, and whether bf16 products are native or widened to fp32.
struct Arithmetic {
    DType dtype;
    bool native_bf16;

    std::string name() const {
        if (dtype != DType::bf16) return std::string(name_of(dtype));
        return native_bf16 ? "bf16" : "bf16_widened";
    }
};

// All ways that this processor supports.
inline std::vector<Arithmetic> arithmetics() {
    std::vector<Arithmetic> all = {{DType::fp32, false}, {DType::bf16, false}, {DType::fp16, false}};
    if (cpu::processor_has_bf16()) all.push_back({DType::bf16, true});
    return all;
}

// The operations with a workspace for the request. The workspace is full of NaN: its old contents must not
// matter.
class Operations {
  public:
    explicit Operations(const WorkspaceRequest& request, bool native_bf16 = false, int threads = 3)
        : ops(threads, native_bf16) {
        workspace_ = std::make_unique<OwnedTensor>(
            DType::int32, Shape{static_cast<std::int64_t>(ops.workspace_bytes(request) / 4)});
        const auto words = (**workspace_).span<std::int32_t>();
        std::fill(words.begin(), words.end(), -1);
        ops.set_workspace(*workspace_);
    }
    // For operations that need no workspace, or only the workspace of layernorm and bias gradients.
    explicit Operations(int threads = 3)
        : Operations(WorkspaceRequest{4, 128, 256, 1, 256, 1, DType::bf16}, false, threads) {}

    cpu::CpuOps* operator->() { return &ops; }

    cpu::CpuOps ops;

  private:
    std::unique_ptr<OwnedTensor> workspace_;
};

// What rounding to a dtype adds to a relative bound: in fp16, numbers below 2^-14 are multiples of 2^-24.
inline double subnormal_rounding(DType dtype) { return dtype == DType::fp16 ? 0x1p-25 : 0.0; }

// |result_i - reference_i| <= bound(i), and the rounding of a subnormal, for every element. A NaN is never close.
// Reports the worst element.
inline void expect_close(const OwnedTensor& result, const std::vector<double>& reference,
                         const std::function<double(std::size_t)>& bound, const std::string& what) {
    ASSERT_EQ(static_cast<std::size_t>(result->elements()), reference.size()) << what;
    const double rounding = subnormal_rounding(result->dtype);
    double worst = -1.0;
    std::size_t at = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) {
        const double error = std::fabs(result.get(static_cast<std::int64_t>(i)) - reference[i]);
        const double ratio = error == 0.0 ? 0.0 : error / (bound(i) + rounding);
        if (!(ratio <= worst)) {
            worst = std::isnan(ratio) ? INFINITY : ratio;
            at = i;
        }
    }
    EXPECT_LE(worst, 1.0) << what << ": element " << at << " is " << result.get(static_cast<std::int64_t>(at))
                          << ", the reference " << reference[at] << ", the bound " << bound(at);
}

inline void expect_same_bits(const OwnedTensor& a, const OwnedTensor& b, const std::string& what) {
    EXPECT_TRUE(a.bytes() == b.bytes()) << what << " differ";
}

}  // namespace llmc::cpu_test
