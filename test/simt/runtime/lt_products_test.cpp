// The inputs and the memory of the CUDA device's matrix products (lt_products.h): where operands may lie,
// which products are distinct, and which algorithms of earlier runs are used. (test/kernels and test/python
// test that products are right. test_simulated_algorithms.py tests the choice by time.)
#include "llmc/device/cuda/lt_products.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/device/cuda/gpus.h"
#include "simt/runtime/child.h"
#include "simt/runtime/cublaslt.h"

namespace runtime_test {
namespace {

using namespace llmc;
using cuda::LtProducts;

// Products of matrices of ones, in fp32, on one device, whose memory holds `bytes` of each operand.
class Products {
  public:
    explicit Products(std::size_t bytes) {
        const std::vector<float> ones(bytes / sizeof(float), 1.0F);
        for (std::byte*& operand : memory_) {
            operand = device_->allocate(bytes, "operands");
            device_->upload({operand, DType::fp32, {std::ssize(ones)}}, ones.data());
        }
        workspace_ = device_->allocate(LtProducts::workspace_bytes, "workspace");
    }
    ~Products() {
        streams_.finish();
        for (std::byte* operand : memory_) device_->release(operand);
        device_->release(workspace_);
    }
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    std::unique_ptr<LtProducts> make() {
        auto products = std::make_unique<LtProducts>(streams_, "a GPU", cuda::sm_80, false, false);
        products->set_workspace(workspace_);
        return products;
    }
    // d, a, b and the bias by number.
    Tensor operand(std::size_t number, DType dtype, const Shape& shape, std::size_t offset = 0) const {
        return {memory_[number] + offset, dtype, shape};
    }

  private:
    std::unique_ptr<Device> device_ = make_cuda_device({});
    cuda::CudaStreams streams_;
    std::array<std::byte*, 4> memory_{};
    std::byte* workspace_;
};

// The lines of choices() after the first, each replaced by `change`.
template <class Change>
std::string changed(const std::string& choices, const Change& change) {
    std::istringstream lines(choices);
    std::string line, text;
    std::getline(lines, text);
    text += '\n';
    for (int number = 1; std::getline(lines, line); ++number) text += change(line, number) + "\n";
    return text;
}

// The product of a line of choices(), with this algorithm.
std::string by(const std::string& line, const simt::runtime::Algorithm& algorithm) {
    cublasLtMatmulAlgo_t opaque{};
    std::memcpy(&opaque, &algorithm, sizeof algorithm);
    std::string text = line.substr(0, line.find(':') + 1);
    for (const std::uint64_t word : opaque.data) text += fmt::format(" {:x}", word);
    return text;
}

// Each operand in turn is aligned to only 16 bytes. An algorithm that needs more refuses it.
TEST(LtProducts, OperandsLieAtAnyRow) {
    const Outcome outcome = run_process({}, [] {
        Products on(512);
        const auto products = on.make();
        for (std::size_t moved = 0; moved < 4; ++moved) {
            const auto operand = [&](std::size_t number, const Shape& shape) {
                return on.operand(number, DType::fp32, shape, number == moved ? 16 : 0);
            };
            const Tensor d = operand(0, {8, 8}), a = operand(1, {8, 8}), b = operand(2, {8, 8});
            products->overwrite(d, {a, 8, 8}, {b, 8, 8}, operand(3, {8}));
            products->accumulate(d, {a, 8, 8}, {b, 8, 8});
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

// Multiplies every distinct kind of product; returns how many.
int multiply_every_kind(const Products& on, LtProducts& products) {
    constexpr std::array<std::array<DType, 2>, 5> dtypes = {{{DType::fp32, DType::fp32},
                                                             {DType::bf16, DType::bf16},
                                                             {DType::bf16, DType::fp32},
                                                             {DType::fp16, DType::fp16},
                                                             {DType::fp16, DType::fp32}}};
    constexpr std::array<std::array<std::int64_t, 3>, 6> sizes = {
        {{8, 16, 24}, {8, 24, 16}, {16, 8, 24}, {16, 24, 8}, {24, 8, 16}, {24, 16, 8}}};
    int count = 0;
    for (const auto& [in, out] : dtypes) {
        for (const auto& [rows, columns, depth] : sizes) {
            for (const int transposed : {0, 1, 2, 3}) {
                const bool of_a = (transposed & 1) != 0, of_b = (transposed & 2) != 0;
                const std::int64_t rows_of_a = of_a ? depth : rows, rows_of_b = of_b ? columns : depth;
                const std::int64_t columns_of_a = rows * depth / rows_of_a;
                const std::int64_t columns_of_b = depth * columns / rows_of_b;
                const Tensor a = on.operand(1, in, {rows_of_a, columns_of_a});
                const Tensor b = on.operand(2, in, {rows_of_b, columns_of_b});
                const Tensor d = on.operand(0, out, {rows, columns});
                const cuda::LtMatrix first{a, rows_of_a, columns_of_a, of_a};
                const cuda::LtMatrix second{b, rows_of_b, columns_of_b, of_b};
                products.overwrite(d, first, second, {});
                products.overwrite(d, first, second, on.operand(3, in, {columns}));
                products.accumulate(d, first, second);
                count += 3;
            }
        }
    }
    return count;
}

// A mark in the last word of each algorithm, which the library does not use, tells them apart. If two
// products were one, or had the same name, one would get the other's mark.
TEST(LtProducts, EveryKindHasAChoiceOfItsOwn) {
    const Outcome outcome = run_process({}, [] {
        Products on(4096);
        const auto chooses = on.make(), adopts = on.make();
        const int kinds = multiply_every_kind(on, *chooses);
        int marks = 0;
        const std::string marked = changed(chooses->choices(), [&](const std::string& line, int number) {
            marks = number;
            return line.substr(0, line.rfind(' ')) + fmt::format(" {:x}", number);
        });
        adopts->adopt_choices(marked);
        multiply_every_kind(on, *adopts);
        return marks == kinds && adopts->choices() == marked;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

// Whether a saved algorithm is used for a square result of this size.
bool takes(const simt::runtime::Algorithm& algorithm, std::int64_t size) {
    Products on(static_cast<std::size_t>(size * size) * sizeof(float));
    const auto multiply = [&](LtProducts& products) {
        const Tensor a = on.operand(1, DType::fp32, {size, 8}), b = on.operand(2, DType::fp32, {8, size});
        products.overwrite(on.operand(0, DType::fp32, {size, size}), {a, size, 8}, {b, 8, size}, {});
        return products.choices();
    };
    const auto chooses = on.make(), adopts = on.make();
    const std::string saved =
        changed(multiply(*chooses), [&](const std::string& line, int) { return by(line, algorithm); });
    adopts->adopt_choices(saved);
    return multiply(*adopts) == saved;
}

TEST(LtProducts, IgnoresSavedAlgorithmsWithOtherBitsTooMuchMemoryOrDamage) {
    const simt::runtime::Algorithm ordered{
        .id = 33, .splits = 2, .reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
    const simt::runtime::Algorithm in_any_order{
        .id = 22, .splits = 2, .reduction = CUBLASLT_REDUCTION_SCHEME_INPLACE};
    const auto run = [](const simt::runtime::Algorithm& algorithm, std::int64_t size, bool taken) {
        return run_process({}, [=] { return takes(algorithm, size) == taken; });
    };
    const Outcome good = run(ordered, 8, true), other_bits = run(in_any_order, 8, false);
    EXPECT_TRUE(good.good()) << good;
    EXPECT_TRUE(other_bits.good()) << other_bits;
    simt::runtime::Algorithm damaged = ordered;
    damaged.alignment = {};
    const Outcome refused = run(damaged, 8, false);
    EXPECT_TRUE(refused.good()) << refused;
    // Two fp32 numbers for each element of the result: a size of 2048 x 2048 takes 32 MiB.
    const Outcome fits = run(ordered, 2048, true), too_large = run(ordered, 2056, false);
    EXPECT_TRUE(fits.good()) << fits;
    EXPECT_TRUE(too_large.good()) << too_large;
}

// It is another rank's choice, so that no other one may take its place here.
TEST(LtProducts, ASavedAlgorithmThatFailsIsAnError) {
    const Outcome outcome = run_process({}, [] {
        try {
            takes({.id = 44}, 8);
        } catch (const UserError& fault) {
            return std::string(fault.what()).find("cannot compute the product 8x8x8") != std::string::npos;
        }
        return false;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(LtProducts, WhatFailsIsLeftOutAndCounted) {
    for (const bool measures : {false, true}) {
        const Outcome outcome = run_process({}, [measures] {
            Products on(512);
            const auto products = on.make();
            products->set_autotuning(measures);
            const Tensor a = on.operand(1, DType::fp32, {8, 8}), b = on.operand(2, DType::fp32, {8, 8});
            products->overwrite(on.operand(0, DType::fp32, {8, 8}), {a, 8, 8}, {b, 8, 8}, {});
            products->overwrite(on.operand(0, DType::fp32, {8, 8}), {a, 8, 8}, {b, 8, 8}, {});
            const LeftOut& left_out = products->left_out();
            return left_out.failing == 1 && left_out.varying == (measures ? 1 : 0) &&
                   cudaGetLastError() == cudaSuccess;
        });
        EXPECT_TRUE(outcome.good()) << outcome;
    }
}

}  // namespace
}  // namespace runtime_test
