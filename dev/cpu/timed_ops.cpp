#include "dev/cpu/timed_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>

namespace llmc::bench {

namespace {

double elements(const Tensor& x) { return x ? static_cast<double>(x.elements()) : 0.0; }

double bytes_of(std::initializer_list<Tensor> operands) {
    double bytes = 0;
    for (const Tensor& x : operands) bytes += x ? static_cast<double>(x.bytes()) : 0.0;
    return bytes;
}

// "384 -> 1536" for a weight (OC,IC)
std::string channels(const Tensor& weight) {
    const Tensor rows = weight.rows();
    return fmt::format("{} -> {}", rows.shape[1], rows.shape[0]);
}

// The elements in heads of all rows, and their bytes.
double elements(const Heads& x) {
    return elements(x.rows) / static_cast<double>(x.rows.shape.last()) *
           static_cast<double>(x.count * x.size);
}
double bytes_of(const Heads& x) { return elements(x) * static_cast<double>(size_of(x.rows.dtype)); }

// The keys that rows [first, end) of a sequence see, all together.
double pairs(std::int64_t first, std::int64_t end, std::int64_t window) {
    // Row t sees t + 1 keys, but at most `window`.
    const std::int64_t full = window == 0 ? end : std::clamp(window, first, end);
    const auto short_rows = static_cast<double>(full - first), long_rows = static_cast<double>(end - full);
    return short_rows * (static_cast<double>(first + full) + 1.0) / 2.0 +
           long_rows * static_cast<double>(window);
}

// The floating-point operations of one product of causal attention, q k^T or p v, for an output (B,T,H,D).
double attention_product(const Tensor& out, std::int64_t window) {
    const std::int64_t T = out.shape[1];
    return 2.0 * elements(out) / static_cast<double>(T) * pairs(0, T, window);
}

class TimedOps final : public Ops {
  public:
    explicit TimedOps(Ops& ops) : ops_(ops) {}

    WorkByOperation take_work() { return std::exchange(work_, {}); }

    void set_workspace(const Tensor& workspace) override { ops_.set_workspace(workspace); }

    void encoder_forward(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe,
                         std::optional<std::int64_t> first_row) override {
        // For each row of the result, a row of each table is read.
        measure("encoder_forward", out.dtype, elements(out), bytes_of({out, out, wpe ? out : wpe, tokens}),
                [&] { ops_.encoder_forward(out, tokens, wte, wpe, first_row); });
    }
    void encoder_backward(const Tensor& dwte, const Tensor& dwpe, const Tensor& dout, const Tensor& tokens,
                          std::optional<std::int64_t> first_row) override {
        measure("encoder_backward", DType::fp32, 2 * elements(dout),
                bytes_of({dout, tokens}) + 2 * 4 * elements(dout),
                [&] { ops_.encoder_backward(dwte, dwpe, dout, tokens, first_row); });
    }

    void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& in,
                           const Tensor& gamma, const Tensor& beta) override {
        measure("layernorm_forward", DType::fp32, 8 * elements(in), bytes_of({out, mean, rstd, in}),
                [&] { ops_.layernorm_forward(out, mean, rstd, in, gamma, beta); });
    }
    void layernorm_backward(const Tensor& din, const Tensor& dgamma, const Tensor& dbeta, const Tensor& dout,
                            const Tensor& in, const Tensor& gamma, const Tensor& mean,
                            const Tensor& rstd) override {
        measure("layernorm_backward", DType::fp32, 16 * elements(in),
                bytes_of({din, din, dout, in, mean, rstd}),
                [&] { ops_.layernorm_backward(din, dgamma, dbeta, dout, in, gamma, mean, rstd); });
    }
    void fused_residual_layernorm_forward(const Tensor& residual, const Tensor& out, const Tensor& mean,
                                          const Tensor& rstd, const Tensor& in1, const Tensor& in2,
                                          const Tensor& gamma, const Tensor& beta) override {
        measure("fused_residual_layernorm_forward", DType::fp32, 9 * elements(in1),
                bytes_of({residual, out, mean, rstd, in1, in2}), [&] {
                    ops_.fused_residual_layernorm_forward(residual, out, mean, rstd, in1, in2, gamma, beta);
                });
    }

    void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& in, const Tensor& weight,
                         float eps) override {
        measure("rmsnorm_forward", DType::fp32, 4 * elements(in), bytes_of({out, rstd, in}),
                [&] { ops_.rmsnorm_forward(out, rstd, in, weight, eps); });
    }
    void rmsnorm_backward(const Tensor& din, const Tensor& dweight, const Tensor& dout, const Tensor& in,
                          const Tensor& weight, const Tensor& rstd) override {
        measure("rmsnorm_backward", DType::fp32, 12 * elements(in), bytes_of({din, din, dout, in, rstd}),
                [&] { ops_.rmsnorm_backward(din, dweight, dout, in, weight, rstd); });
    }
    void fused_residual_rmsnorm_forward(const Tensor& residual, const Tensor& out, const Tensor& rstd,
                                        const Tensor& in1, const Tensor& in2, const Tensor& weight,
                                        float eps) override {
        measure("fused_residual_rmsnorm_forward", DType::fp32, 5 * elements(in1),
                bytes_of({residual, out, rstd, in1, in2}),
                [&] { ops_.fused_residual_rmsnorm_forward(residual, out, rstd, in1, in2, weight, eps); });
    }

    void matmul_forward(const Tensor& out, const Tensor& in, const Tensor& weight, const Tensor& bias,
                        const Tensor& pre_gelu) override {
        const double rows = elements(in) / static_cast<double>(weight.shape.last());
        measure("matmul_forward " + channels(weight) + (pre_gelu ? " GELU" : ""), out.dtype,
                2 * rows * elements(weight), bytes_of({out, in, weight, bias, pre_gelu}),
                [&] { ops_.matmul_forward(out, in, weight, bias, pre_gelu); });
    }
    void matmul_backward(const Tensor& din, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                         const Tensor& in, const Tensor& weight, const Tensor& pre_gelu) override {
        const double rows = elements(in) / static_cast<double>(weight.shape.last());
        const double products = (din ? 1 : 0) + (dweight ? 1 : 0);
        measure("matmul_backward " + channels(weight) + (pre_gelu ? " GELU" : ""), dout.dtype,
                products * 2 * rows * elements(weight),
                bytes_of({din, dweight, dweight, dout, in, weight, pre_gelu}),
                [&] { ops_.matmul_backward(din, dweight, dbias, dout, in, weight, pre_gelu); });
    }

    void gelu_forward(const Tensor& out, const Tensor& in) override {
        measure("gelu_forward", DType::fp32, 0, bytes_of({out, in}), [&] { ops_.gelu_forward(out, in); });
    }
    void gelu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) override {
        measure("gelu_backward", DType::fp32, 0, bytes_of({din, dout, in}),
                [&] { ops_.gelu_backward(din, dout, in); });
    }

    void swiglu_forward(const Tensor& out, const Tensor& in) override {
        measure("swiglu_forward", DType::fp32, 5 * elements(out), bytes_of({out, in}),
                [&] { ops_.swiglu_forward(out, in); });
    }
    void swiglu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) override {
        measure("swiglu_backward", DType::fp32, 11 * elements(dout), bytes_of({din, dout, in}),
                [&] { ops_.swiglu_backward(din, dout, in); });
    }
    void relu_squared_forward(const Tensor& out, const Tensor& in) override {
        measure("relu_squared_forward", DType::fp32, 2 * elements(in), bytes_of({out, in}),
                [&] { ops_.relu_squared_forward(out, in); });
    }
    void relu_squared_backward(const Tensor& din, const Tensor& dout, const Tensor& in) override {
        measure("relu_squared_backward", DType::fp32, 3 * elements(in), bytes_of({din, dout, in}),
                [&] { ops_.relu_squared_backward(din, dout, in); });
    }

    void attention_forward(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                           const Heads& v, std::int64_t window) override {
        measure("attention_forward", out.dtype, 2 * attention_product(out, window),
                bytes_of({out, lse}) + bytes_of(q) + bytes_of(k) + bytes_of(v),
                [&] { ops_.attention_forward(out, lse, q, k, v, window); });
    }
    void attention_backward(const Heads& dq, const Heads& dk, const Heads& dv, const Tensor& dout,
                            const Heads& q, const Heads& k, const Heads& v, const Tensor& out,
                            const Tensor& lse, std::int64_t window) override {
        measure("attention_backward", out.dtype, 5 * attention_product(out, window),
                bytes_of({dout, out, lse}) + bytes_of(dq) + bytes_of(dk) + bytes_of(dv) + bytes_of(q) +
                    bytes_of(k) + bytes_of(v),
                [&] { ops_.attention_backward(dq, dk, dv, dout, q, k, v, out, lse, window); });
    }

    void attention_cached_forward(const Tensor& out, const Tensor& cache, const Heads& q, const Heads& k,
                                  const Heads& v, std::int64_t position, std::int64_t window) override {
        const std::int64_t n = out.shape[0];
        const double per_pair = 4.0 * elements(out) / static_cast<double>(n);
        // The earlier rows of the cache that the first row sees are read, and the new ones written.
        const std::int64_t seen = window == 0 ? position : std::min(position, window - 1);
        const double row = bytes_of({cache}) / static_cast<double>(cache.shape[0]);
        measure(
            "attention_cached_forward", out.dtype, per_pair * pairs(position, position + n, window),
            bytes_of({out}) + bytes_of(q) + bytes_of(k) + bytes_of(v) + row * static_cast<double>(seen + n),
            [&] { ops_.attention_cached_forward(out, cache, q, k, v, position, window); });
    }

    void rope(const Heads& x, const Tensor& angles, std::int64_t position, bool inverse) override {
        measure("rope", DType::fp32, 3 * elements(x), 2 * bytes_of(x),
                [&] { ops_.rope(x, angles, position, inverse); });
    }
    void head_norm_forward(const Heads& out, const Tensor& rstd, const Heads& in, const Tensor& weight,
                           float eps, const std::optional<SharedRows>& shared) override {
        measure("head_norm_forward", DType::fp32, 4 * elements(in), 2 * bytes_of(in) + bytes_of({rstd}),
                [&] { ops_.head_norm_forward(out, rstd, in, weight, eps, shared); });
    }
    void head_norm_sums(const Tensor& sums, const Heads& in) override {
        measure("head_norm_sums", DType::fp32, 2 * elements(in), bytes_of(in) + bytes_of({sums}),
                [&] { ops_.head_norm_sums(sums, in); });
    }
    void head_norm_backward(const Heads& din, const Tensor& dweight, const Heads& dout, const Heads& in,
                            const Tensor& weight, const Tensor& rstd,
                            const std::optional<SharedRows>& shared) override {
        measure("head_norm_backward", DType::fp32, 12 * elements(in), 3 * bytes_of(in) + bytes_of({rstd}),
                [&] { ops_.head_norm_backward(din, dweight, dout, in, weight, rstd, shared); });
    }
    void head_norm_backward_sums(const Tensor& sums, const Heads& dout, const Heads& in, const Tensor& weight,
                                 const Tensor& rstd) override {
        measure("head_norm_backward_sums", DType::fp32, 4 * elements(in),
                2 * bytes_of(in) + bytes_of({sums, rstd}),
                [&] { ops_.head_norm_backward_sums(sums, dout, in, weight, rstd); });
    }

    void fused_classifier(const Tensor& logits, const Tensor& losses, const Tensor& targets,
                          std::int64_t vocabulary, float scale, bool write_dlogits,
                          const ClassifierTerms& terms) override {
        measure("fused_classifier", DType::fp32, 0,
                bytes_of({logits, losses, targets}) + (write_dlogits ? bytes_of({logits}) : 0.0), [&] {
                    ops_.fused_classifier(logits, losses, targets, vocabulary, scale, write_dlogits, terms);
                });
    }

    void classifier_statistics(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                               std::int64_t columns, std::int64_t first_column,
                               const ClassifierTerms& terms) override {
        measure("classifier_statistics", DType::fp32, 0, bytes_of({statistics, logits, targets}), [&] {
            ops_.classifier_statistics(statistics, logits, targets, columns, first_column, terms);
        });
    }
    void classifier_from_statistics(const Tensor& logits, const Tensor& losses, const Tensor& all_statistics,
                                    const Tensor& targets, std::int64_t columns, std::int64_t first_column,
                                    float scale, bool write_dlogits, const ClassifierTerms& terms) override {
        measure(
            "classifier_from_statistics", DType::fp32, 0,
            bytes_of({losses, all_statistics, targets}) + (write_dlogits ? bytes_of({logits, logits}) : 0.0),
            [&] {
                ops_.classifier_from_statistics(logits, losses, all_statistics, targets, columns,
                                                first_column, scale, write_dlogits, terms);
            });
    }
    void soft_cap(const Tensor& out, const Tensor& in, float cap) override {
        measure("soft_cap", DType::fp32, 0, bytes_of({out, in}), [&] { ops_.soft_cap(out, in, cap); });
    }

    void global_norm_squared(const Tensor& partials, const Tensor& x) override {
        measure("global_norm_squared", DType::fp32, 2 * elements(x), bytes_of({partials, x}),
                [&] { ops_.global_norm_squared(partials, x); });
    }
    void sum(const Tensor& out, const Tensor& x) override {
        measure("sum", DType::fp32, elements(x), bytes_of({x}), [&] { ops_.sum(out, x); });
    }
    void adamw(const Tensor& parameters, const Tensor& master, const Tensor& m, const Tensor& v,
               const Tensor& gradients, const Tensor& norm_squared, std::span<const AdamWSegment> segments,
               const AdamWStep& step, const std::optional<StochasticRounding>& rounding,
               const std::optional<StochasticRounding>& rounding_of_moments,
               const EightBitMoments& in_8_bits) override {
        const Tensor rounded = parameters.dtype == DType::fp32 ? Tensor{} : parameters;
        measure("adamw", DType::fp32, 15 * elements(m),
                bytes_of({rounded, master, master, m, m, v, v, gradients}), [&] {
                    ops_.adamw(parameters, master, m, v, gradients, norm_squared, segments, step, rounding,
                               rounding_of_moments, in_8_bits);
                });
    }

    void amax(const Tensor& out, const Tensor& x) override {
        measure("amax", DType::fp32, 0, bytes_of({x}), [&] { ops_.amax(out, x); });
    }
    void quantise(const Tensor& out, const Tensor& x, const Tensor& amax, Fp8 format) override {
        measure("quantise", DType::fp32, 0, bytes_of({out, x}), [&] { ops_.quantise(out, x, amax, format); });
    }

    void cast(const Tensor& out, const Tensor& in) override {
        measure("cast", DType::fp32, 0, bytes_of({out, in}), [&] { ops_.cast(out, in); });
    }
    void copy(const Tensor& out, const Tensor& in) override {
        measure("copy", DType::fp32, 0, bytes_of({out, in}), [&] { ops_.copy(out, in); });
    }
    void fill(const Tensor& out, float value) override {
        measure("fill", DType::fp32, 0, bytes_of({out}), [&] { ops_.fill(out, value); });
    }
    void add(const Tensor& out, const Tensor& a, const Tensor& b) override {
        measure("add", DType::fp32, elements(out), bytes_of({out, a, b}), [&] { ops_.add(out, a, b); });
    }
    void accumulate(const Tensor& out, const Tensor& in, const StochasticRounding& rounding,
                    std::int64_t count) override {
        measure("accumulate", DType::fp32, elements(out), bytes_of({out, out, in}),
                [&] { ops_.accumulate(out, in, rounding, count); });
    }
    void all_finite(const Tensor& flag, const Tensor& x) override {
        measure("all_finite", DType::fp32, 0, bytes_of({x}), [&] { ops_.all_finite(flag, x); });
    }

  private:
    template <class F>
    void measure(const std::string& name, DType dtype, double flops, double bytes, const F& f) {
        const auto start = std::chrono::steady_clock::now();
        f();
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        Work& work = work_[name];
        work.calls += 1;
        work.seconds += elapsed.count();
        work.flops += flops;
        work.bytes += bytes;
        work.dtype = dtype;
    }

    Ops& ops_;
    WorkByOperation work_;
};

}  // namespace

TimedDevice::TimedDevice(Device& device) : DeviceWithOps(device, std::make_unique<TimedOps>(device.ops())) {}

WorkByOperation TimedDevice::take_work() { return static_cast<TimedOps&>(ops()).take_work(); }

}  // namespace llmc::bench
