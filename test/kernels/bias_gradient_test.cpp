// The gradient of a bias against the CPU device.
#include "llmc/device/cuda/bias_gradient.cuh"

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int columns;
};
const std::vector<Shape> bias_shapes = {{130, 72}, {1, 8}, {33, 768}, {500, 136}, {1100, 40}};

template <class X>
class BiasGradient : public Kernels<X> {};
TYPED_TEST_SUITE(BiasGradient, Dtypes);

TYPED_TEST(BiasGradient, Accumulates) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, columns] : shapes(bias_shapes)) {
            Draw draw(seed());
            Array<X> dout(rows * columns), in(rows * 8), weight(std::int64_t{columns} * 8);
            Array<float> before(columns), dbias(columns), again(columns), expected(columns);
            Array<std::byte> workspace(static_cast<std::int64_t>(
                llmc::cuda::bias_gradient_workspace_bytes<X>(on.chip, rows, columns)));
            draw.normal(dout, 1, 0.2);
            draw.normal(before, 1);
            in.fill(llmc::cuda::from_float<X>(0));
            weight.fill(llmc::cuda::from_float<X>(0));
            for (Array<float>* result : {&dbias, &again}) {
                result->copy_from(before);
                workspace.clear();
                llmc::cuda::bias_gradient(on, result->data(), dout.data(), rows, columns, workspace.data());
                synchronize();
            }
            EXPECT_EQ(std::memcmp(dbias.data(), again.data(), dbias.bytes()), 0) << "from run to run";

            const llmc::WorkspaceRequest request{.batch = 1,
                                                 .sequence = rows,
                                                 .channels = columns,
                                                 .heads = 1,
                                                 .largest_matmul_channels = columns,
                                                 .head_rows = rows,
                                                 .dtype = tensor(dout, {rows, columns}).dtype};
            Array<float> cpu_workspace(
                static_cast<std::int64_t>(cpu_sizes().workspace_bytes(request) / sizeof(float)));
            cpu().set_workspace(tensor(cpu_workspace, {cpu_workspace.size()}));
            expected.copy_from(before);
            cpu().run(llmc::MatmulBackward{{},
                                           {},
                                           tensor(expected, {columns}),
                                           tensor(dout, {rows, columns}),
                                           tensor(in, {rows, 8}),
                                           tensor(weight, {columns, 8})});
            cpu().set_workspace({});
            Comparison comparison;
            for (int c = 0; c < columns; ++c) {
                double magnitude = std::fabs(before[c]);
                for (std::int64_t row = 0; row < rows; ++row) {
                    magnitude += std::fabs(to_float(dout[row * columns + c]));
                }
                // Each device does one addition per row.
                comparison.see("dbias", c, dbias[c], expected[c],
                               2 * static_cast<double>(rows) * lab::unit_roundoff<float> * magnitude);
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(BiasGradient, WorkspaceIsEnoughForFewerColumns) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t rows : {1, 300, 5000, 100000}) {
            for (const int most : {64, 768, 3200}) {
                const auto enough = llmc::cuda::bias_gradient_workspace_bytes_up_to<X>(on.chip, rows, most);
                for (int columns = 8; columns <= most; columns += 8) {
                    ASSERT_LE(llmc::cuda::bias_gradient_workspace_bytes<X>(on.chip, rows, columns), enough);
                }
            }
        }
    }
}

}  // namespace
}  // namespace kernel_test
