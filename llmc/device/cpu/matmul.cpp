// Matrix products with their bias and GELU. oneDNN computes the products themselves (products.h), except that of one
// row.
#include <algorithm>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/products.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/cpu/widened_product.h"

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

void CpuOps::compute(const MatmulForward& op, const MatmulSizes& sizes) {
    const Tensor& product_out = op.pre_gelu ? op.pre_gelu : op.out;
    const Matrix sums(product_out);
    const Matrix weight_transposed = Matrix(op.weight).transposed();
    if (sizes.rows == 1) {
        multiply_row(threads_, product_out, op.in, op.weight, op.bias);
    } else if (is_native(op.out.dtype)) {
        products_->multiply(sums, Matrix(op.in), weight_transposed, Into::overwrite, op.bias.data);
    } else {
        WidenedProduct product(*products_, threads_, false,
                               workspace(WidenedProduct::floats(largest(sizes))));
        with_dtype(op.out.dtype, [&](auto element) {
            using X = decltype(element);
            if (op.bias) {
                product.overwrite<X>(sums, Matrix(op.in), weight_transposed,
                                     [b = op.bias.as<X>()](float sum, std::int64_t, std::int64_t column) {
                                         return sum + to_float(b[column]);
                                     });
            } else {
                product.overwrite<X>(sums, Matrix(op.in), weight_transposed, plain);
            }
        });
    }
    if (op.pre_gelu) run(GeluForward{op.out, op.pre_gelu});
}

void CpuOps::compute(const MatmulBackward& op, const MatmulSizes& sizes) {
    const bool fp32 = op.dout.dtype == DType::fp32;
    float* const scratch = fp32 ? nullptr : workspace(WidenedProduct::floats(largest(sizes)));
    WidenedProduct widened(*products_, threads_, is_native(op.dout.dtype), scratch);
    if (op.dweight) {
        const Matrix dw(op.dweight.view({sizes.out_channels, sizes.in_channels}));
        const Matrix dout_transposed = Matrix(op.dout).transposed();
        if (is_native(op.dout.dtype)) {
            products_->multiply(dw, dout_transposed, Matrix(op.in), Into::accumulate);
        } else {
            widened.accumulate(dw, dout_transposed, Matrix(op.in));
        }
    }
    if (op.dbias) bias_gradient(op.dbias, op.dout);
    if (!op.din) return;

    const Matrix dx(op.din);
    if (fp32) {
        products_->multiply(dx, Matrix(op.dout), Matrix(op.weight));
        if (op.pre_gelu) run(GeluBackward{op.din, op.din, op.pre_gelu});
    } else if (op.pre_gelu) {
        // The product stays in fp32 until it is multiplied by GELU', so that it is rounded only once.
        with_dtype(op.dout.dtype, [&](auto element) {
            using X = decltype(element);
            const auto times_derivative = [x = op.pre_gelu.as<X>(), columns = sizes.in_channels](
                                              float sum, std::int64_t row, std::int64_t column) {
                return sum * gelu_derivative(to_float(x[row * columns + column]));
            };
            widened.overwrite<X>(dx, Matrix(op.dout), Matrix(op.weight), times_derivative);
        });
    } else if (is_native(op.dout.dtype)) {
        products_->multiply(dx, Matrix(op.dout), Matrix(op.weight));
    } else {
        with_dtype(op.dout.dtype, [&](auto element) {
            widened.overwrite<decltype(element)>(dx, Matrix(op.dout), Matrix(op.weight), plain);
        });
    }
}

void CpuOps::compute(const MatmulAdd& op, const MatmulSizes& sizes) {
    const auto matrix = [](const Heads& of, bool is_transposed) {
        const Matrix columns = Matrix(of.rows).part(0, number_of_rows(of), of.first, of.count * of.size);
        return is_transposed ? columns.transposed() : columns;
    };
    const Matrix c = matrix(op.out, false), a = matrix(op.a, op.a_transposed),
                 b = matrix(op.b, op.b_transposed);
    if (is_native(a.dtype)) return products_->multiply(c, a, b, Into::accumulate, nullptr, op.scale);
    WidenedProduct product(*products_, threads_, false, workspace(WidenedProduct::floats(largest(sizes))));
    with_dtype(c.dtype, [&](auto element) {
        using X = decltype(element);
        product.overwrite<X>(c, a, b,
                             [&, to = reinterpret_cast<const X*>(c.data), stride = c.row_stride](
                                 float sum, std::int64_t row, std::int64_t column) {
                                 return to_float(to[row * stride + column]) + op.scale * sum;
                             });
    });
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
