// The CUDA device's products in 8 bits, from the contract of ops.h down to kernels and cuBLASLt, against the CPU
// device's, which reads the same numbers as bf16.
#include <cmath>
#include <cstdio>
#include <cstring>

#include "llmc/core/random.h"
#include "llmc/device/cuda/gpus.h"
#include "llmc/device/ops.h"
#include "simt/runtime/child.h"

namespace runtime_test {
namespace {

using namespace llmc;

// Tensors on one device, with the memory that they need.
class OnDevice {
  public:
    explicit OnDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {
        const std::size_t bytes =
            device_->sizes().workspace_bytes(WorkspaceRequest{.batch = 1,
                                                              .sequence = 64,
                                                              .channels = 128,
                                                              .heads = 1,
                                                              .largest_matmul_channels = 128,
                                                              .head_rows = 64,
                                                              .dtype = DType::bf16});
        const auto words = static_cast<std::int64_t>(bytes / 4);
        ops().set_workspace(made(DType::int32, {words}));
    }
    ~OnDevice() {
        device_->synchronize();
        for (std::byte* memory : memory_) device_->release(memory);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    Ops& ops() { return device_->ops(); }
    Tensor made(DType dtype, const Shape& shape) {
        Tensor tensor{nullptr, dtype, shape};
        memory_.push_back(device_->allocate(tensor.bytes(), "a tensor"));
        tensor.data = memory_.back();
        return tensor;
    }
    Tensor of(DType dtype, const Shape& shape, const std::vector<float>& values) {
        const Tensor tensor = made(dtype, shape);
        upload_rounded(*device_, tensor, values);
        return tensor;
    }
    std::vector<float> values(const Tensor& tensor) {
        device_->synchronize();
        std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
        download_widened(*device_, values, tensor);
        return values;
    }

  private:
    std::unique_ptr<Device> device_;
    std::vector<std::byte*> memory_;
};

std::vector<float> normal(const std::string& name, std::int64_t count, double deviation) {
    const RandomStream random(1, name);
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i)
        values.push_back(static_cast<float>(deviation * random.normal(static_cast<std::uint64_t>(i))));
    return values;
}

constexpr std::int64_t rows = 48, inputs = 80, outputs = 112;

struct Results {
    std::vector<float> out, pre_gelu, din, dweight;
};

// The operands of a product and of its gradients, in bf16; their greatest magnitudes; and where the results go.
struct Operands {
    Tensor in, weight, dout, bias, before, amax_in, amax_weight, amax_dout, out, pre_gelu, din, dweight;
};

// A product and its gradients; `product` makes both from the operands in 8 bits.
template <class Product>
Results results_on(OnDevice& device, const Product& product) {
    const DType X = DType::bf16;
    const Tensor in = device.of(X, {rows, inputs}, normal("in", rows * inputs, 1)),
                 weight = device.of(X, {outputs, inputs}, normal("weight", outputs * inputs, 0.02)),
                 dout = device.of(X, {rows, outputs}, normal("dout", rows * outputs, 1e-4)),
                 bias = device.of(X, {outputs}, normal("bias", outputs, 1)),
                 before = device.of(X, {rows, inputs}, normal("before", rows * inputs, 1));
    const auto greatest = [&](const Tensor& of) {
        const Tensor amax = device.of(DType::fp32, {1}, {0});
        device.ops().amax(amax, of);
        return amax;
    };
    const Tensor out = device.made(X, {rows, outputs}), pre_gelu = device.made(X, {rows, outputs}),
                 din = device.made(X, {rows, inputs}),
                 dweight =
                     device.of(DType::fp32, {outputs, inputs}, normal("dweight", outputs * inputs, 1e-3));
    product(Operands{in, weight, dout, bias, before, greatest(in), greatest(weight), greatest(dout), out,
                     pre_gelu, din, dweight});
    return {device.values(out), device.values(pre_gelu), device.values(din), device.values(dweight)};
}

Results on_the_cpu() {
    OnDevice device(make_cpu_device(1));
    return results_on(device, [&](const Operands& of) {
        const auto rounded = [&](const Tensor& x, const Tensor& amax, Fp8 format) {
            const Tensor made = device.made(DType::bf16, x.shape);
            device.ops().quantise(made, x, amax, format);
            return made;
        };
        const Tensor in = rounded(of.in, of.amax_in, Fp8::e4m3),
                     weight = rounded(of.weight, of.amax_weight, Fp8::e4m3),
                     dout = rounded(of.dout, of.amax_dout, Fp8::e5m2);
        device.ops().matmul_forward(of.out, in, weight, of.bias, of.pre_gelu);
        device.ops().matmul_backward(of.din, of.dweight, {}, dout, in, weight, of.before);
    });
}

Results on_the_gpu() {
    OnDevice device(make_cuda_device({}));
    return results_on(device, [&](const Operands& of) {
        const auto copies = [&](const Tensor& x, const Tensor& amax, Fp8 format) {
            const Fp8Copies made{device.made(DType::uint8, x.shape),
                                 device.made(DType::uint8, {x.shape[1], x.shape[0]}),
                                 device.made(DType::fp32, {1})};
            device.ops().quantise_to_bytes(made, x, amax, format);
            return made;
        };
        const Fp8Copies in = copies(of.in, of.amax_in, Fp8::e4m3),
                        weight = copies(of.weight, of.amax_weight, Fp8::e4m3),
                        dout = copies(of.dout, of.amax_dout, Fp8::e5m2);
        device.ops().fp8_matmul_forward(of.out, in, weight, of.bias, of.pre_gelu);
        device.ops().fp8_matmul_backward(of.din, of.dweight, dout, in, weight, of.before);
    });
}

// Both devices multiply the same numbers. Sums of at most 112 terms in fp32 differ by 2 * 112 * 2^-24 of the sum of the
// terms' magnitudes, at most about 9 times the greatest result here, and each device rounds to bf16 twice. The GPU
// keeps 14 bits of a sum before another number is added to it, which is no greater than the greatest result.
bool are_near(const char* name, const std::vector<float>& got, const std::vector<float>& wanted,
              double roundings) {
    double greatest = 0;
    for (const float x : wanted) greatest = std::max(greatest, std::fabs(static_cast<double>(x)));
    const double bound = (9 * 2 * 112 * 0x1p-24 + 2 * 0x1p-13 + roundings * 2 * 0x1p-8) * greatest;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (std::fabs(static_cast<double>(got[i]) - static_cast<double>(wanted[i])) <= bound) continue;
        std::fprintf(stderr, "%s[%zu] is %g, not %g\n", name, i, static_cast<double>(got[i]),
                     static_cast<double>(wanted[i]));
        return false;
    }
    return true;
}

TEST(CudaFp8, ProductsAreThoseOfTheCpu) {
    const Results wanted = on_the_cpu();
    const Outcome outcome = run_process({{"SIMT_CHIP", "90"}, {"SIMT_SEED", "1"}}, [&] {
        const Results got = on_the_gpu();
        return are_near("pre_gelu", got.pre_gelu, wanted.pre_gelu, 1) &&
               are_near("out", got.out, wanted.out, 2) && are_near("din", got.din, wanted.din, 2) &&
               are_near("dweight", got.dweight, wanted.dweight, 0);
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaFp8, NanReachesTheGradients) {
    const Outcome outcome = run_process({{"SIMT_CHIP", "90"}, {"SIMT_SEED", "1"}}, [] {
        OnDevice device(make_cuda_device({}));
        std::vector<float> values = normal("dout", rows * outputs, 1);
        values[5 * outputs + 7] = INFINITY;
        const Tensor dout = device.of(DType::bf16, {rows, outputs}, values),
                     in = device.of(DType::bf16, {rows, inputs}, normal("in", rows * inputs, 1)),
                     amax = device.of(DType::fp32, {1}, {4}),
                     dweight =
                         device.of(DType::fp32, {outputs, inputs}, std::vector<float>(outputs * inputs));
        const auto copies = [&](const Tensor& x, Fp8 format) {
            const Fp8Copies made{
                {}, device.made(DType::uint8, {x.shape[1], x.shape[0]}), device.made(DType::fp32, {1})};
            device.ops().quantise_to_bytes(made, x, amax, format);
            return made;
        };
        device.ops().fp8_matmul_backward({}, dweight, copies(dout, Fp8::e5m2), copies(in, Fp8::e4m3), {}, {});
        const std::vector<float> got = device.values(dweight);
        for (std::int64_t i = 0; i < outputs * inputs; ++i) {
            const bool is_nan = std::isnan(got[static_cast<std::size_t>(i)]);
            if (is_nan != (i / inputs == 7)) return false;
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

}  // namespace
}  // namespace runtime_test
