// Matrix products with their bias and GELU. oneDNN computes the products themselves (products.h), except that of one
// row.
#include <algorithm>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/products.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/cpu/widened_product.h"
#include "llmc/device/operands.h"

namespace llmc::cpu {

namespace {

std::int64_t largest(const MatmulSizes& s) { return std::max({s.rows, s.in_channels, s.out_channels}); }

float plain(float sum, std::int64_t, std::int64_t) { return sum; }

// The product of one row, as in generation: a dot product for each row of the weight. The weight is read once, at the
// speed of memory. oneDNN takes twice as long.
void multiply_row(int threads, const Tensor& out, const Tensor& in, const Tensor& weight,
                  const Tensor& bias) {
    with_dtype(out.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads, out.elements(),
                     [y = out.as<X>(), x = in.as<X>(), w = weight.as<X>(), b = bias ? bias.as<X>() : nullptr,
                      channels = in.elements()](std::int64_t o) {
                         const X* const row = w + o * channels;
                         const float sum = lane_sum<float>(
                             channels, [=](std::int64_t i) { return to_float(x[i]) * to_float(row[i]); });
                         y[o] = from_float<X>(b ? sum + to_float(b[o]) : sum);
                     });
    });
}

}  // namespace

void CpuOps::matmul_forward(const Tensor& out, const Tensor& in, const Tensor& weight, const Tensor& bias,
                            const Tensor& pre_gelu) {
    const MatmulSizes sizes = matmul_forward_sizes(out, in, weight, bias, pre_gelu);

    const Tensor& product_out = pre_gelu ? pre_gelu : out;
    const Matrix sums(product_out);
    const Matrix weight_transposed = Matrix(weight).transposed();
    if (sizes.rows == 1) {
        multiply_row(threads_, product_out, in, weight, bias);
    } else if (is_native(out.dtype)) {
        products_->multiply(sums, Matrix(in), weight_transposed, Into::overwrite, bias.data);
    } else {
        WidenedProduct product(*products_, threads_, false,
                               workspace(WidenedProduct::floats(largest(sizes))));
        with_dtype(out.dtype, [&](auto element) {
            using X = decltype(element);
            if (bias) {
                product.overwrite<X>(sums, Matrix(in), weight_transposed,
                                     [b = bias.as<X>()](float sum, std::int64_t, std::int64_t column) {
                                         return sum + to_float(b[column]);
                                     });
            } else {
                product.overwrite<X>(sums, Matrix(in), weight_transposed, plain);
            }
        });
    }
    if (pre_gelu) gelu_forward(out, pre_gelu);
}

void CpuOps::matmul_backward(const Tensor& din, const Tensor& dweight, const Tensor& dbias,
                             const Tensor& dout, const Tensor& in, const Tensor& weight,
                             const Tensor& pre_gelu) {
    const MatmulSizes sizes = matmul_backward_sizes(din, dweight, dbias, dout, in, weight, pre_gelu);

    const bool fp32 = dout.dtype == DType::fp32;
    float* const scratch = fp32 ? nullptr : workspace(WidenedProduct::floats(largest(sizes)));
    WidenedProduct widened(*products_, threads_, is_native(dout.dtype), scratch);
    if (dweight) {
        const Matrix dw(dweight.view({sizes.out_channels, sizes.in_channels}));
        const Matrix dout_transposed = Matrix(dout).transposed();
        if (is_native(dout.dtype)) {
            products_->multiply(dw, dout_transposed, Matrix(in), Into::accumulate);
        } else {
            widened.accumulate(dw, dout_transposed, Matrix(in));
        }
    }
    if (dbias) bias_gradient(dbias, dout);
    if (!din) return;

    const Matrix dx(din);
    if (fp32) {
        products_->multiply(dx, Matrix(dout), Matrix(weight));
        if (pre_gelu) gelu_backward(din, din, pre_gelu);
    } else if (pre_gelu) {
        // The product stays in fp32 until it is multiplied by GELU', so that it is rounded only once.
        with_dtype(dout.dtype, [&](auto element) {
            using X = decltype(element);
            const auto times_derivative = [x = pre_gelu.as<X>(), columns = sizes.in_channels](
                                              float sum, std::int64_t row, std::int64_t column) {
                return sum * gelu_derivative(to_float(x[row * columns + column]));
            };
            widened.overwrite<X>(dx, Matrix(dout), Matrix(weight), times_derivative);
        });
    } else if (is_native(dout.dtype)) {
        products_->multiply(dx, Matrix(dout), Matrix(weight));
    } else {
        with_dtype(dout.dtype, [&](auto element) {
            widened.overwrite<decltype(element)>(dx, Matrix(dout), Matrix(weight), plain);
        });
    }
}

void CpuOps::bias_gradient(const Tensor& dbias, const Tensor& dout) const {
    const Tensor rows = dout.rows();
    const RowBlocks blocks(rows.shape[0]);
    const std::int64_t columns = rows.shape[1];
    float* const partials = workspace(blocks.count * columns);
    with_dtype(dout.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, blocks.count, [=, dy = rows.as<X>()](std::int64_t block) {
            float* sum = partials + block * columns;
            std::fill_n(sum, columns, 0.0F);
            for (std::int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                const X* values = dy + row * columns;
#pragma omp simd
                for (std::int64_t j = 0; j < columns; ++j) sum[j] += to_float(values[j]);
            }
        });
    });
    add_partials(threads_, dbias.as<float>(), partials, blocks.count, columns, columns);
}

std::int64_t CpuOps::matmul_floats(const WorkspaceRequest& request) const {
    const std::int64_t rows = std::max(request.batch * request.sequence, request.head_rows);
    const std::int64_t channels = request.largest_matmul_channels;
    const std::int64_t bias_gradient_floats = RowBlocks::count_up_to(rows) * channels;
    if (request.dtype == DType::fp32) return bias_gradient_floats;
    return std::max(bias_gradient_floats, WidenedProduct::floats(std::max(rows, channels)));
}

}  // namespace llmc::cpu
