#include "llmc/device/cpu/products.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <initializer_list>
#include <oneapi/dnnl/dnnl.hpp>
#include <string_view>
#include <vector>

#include "llmc/device/cpu/parallel.h"

namespace llmc::cpu {

namespace {

// Sets the number of threads of oneDNN, which reads it from the OpenMP setting of the calling thread.
class ThreadsOfOneDnn {
  public:
    explicit ThreadsOfOneDnn(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
    ~ThreadsOfOneDnn() { omp_set_num_threads(before_); }
    ThreadsOfOneDnn(const ThreadsOfOneDnn&) = delete;
    ThreadsOfOneDnn& operator=(const ThreadsOfOneDnn&) = delete;

  private:
    int before_;
};

// oneDNN 2.6's products with AMX are wrong for some shapes, such as 51 x 63 transposed times 63 x 96, and end in an
// illegal instruction for others. So it takes AVX-512's bf16 instructions, unless the environment chooses.
void avoid_wrong_products() {
    static const bool done = [] {
        const bool is_chosen =
            std::getenv("ONEDNN_MAX_CPU_ISA") != nullptr || std::getenv("DNNL_MAX_CPU_ISA") != nullptr;
        if (!is_chosen && dnnl::version()->major < 3) dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core_bf16);
        return true;
    }();
    static_cast<void>(done);
}

// In oneDNN, an instruction set is a set of bits that includes the bits of lesser sets.
bool processor_has(dnnl::cpu_isa isa) {
    avoid_wrong_products();
    const auto bits = static_cast<unsigned>(isa);
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & bits) == bits;
}

dnnl::memory::data_type data_type(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return dnnl::memory::data_type::f32;
        case DType::bf16:
            return dnnl::memory::data_type::bf16;
        case DType::fp16:  // oneDNN 2.6 has no such products on CPUs
        case DType::fp64:
        case DType::int32:
        case DType::uint8:
            break;
    }
    programming_error("a product in fp32 or bf16");
}

dnnl::memory::desc description(const Matrix& m) {
    return {{m.rows, m.columns}, data_type(m.dtype), {m.row_stride, m.column_stride}};
}

}  // namespace

Matrix::Matrix(const Tensor& tensor) : data(tensor.data), dtype(tensor.dtype), column_stride(1) {
    const Shape shape = tensor.rows().shape;
    rows = shape[0];
    columns = shape[1];
    row_stride = columns;
}

Matrix::Matrix(float* values, std::int64_t row_count, std::int64_t column_count)
    : data(reinterpret_cast<std::byte*>(values)),
      dtype(DType::fp32),
      rows(row_count),
      columns(column_count),
      row_stride(column_count),
      column_stride(1) {}

Matrix Matrix::transposed() const {
    Matrix t = *this;
    std::swap(t.rows, t.columns);
    std::swap(t.row_stride, t.column_stride);
    return t;
}

Matrix Matrix::part(std::int64_t first_row, std::int64_t row_count, std::int64_t first_column,
                    std::int64_t column_count) const {
    Matrix p = *this;
    const std::int64_t offset = first_row * row_stride + first_column * column_stride;
    p.data += offset * static_cast<std::int64_t>(size_of(dtype));
    p.rows = row_count;
    p.columns = column_count;
    return p;
}

bool has_avx512() {
    static const bool has = processor_has(dnnl::cpu_isa::avx512_core);
    return has;
}

bool processor_has_bf16() { return processor_has(dnnl::cpu_isa::avx512_core_bf16); }

struct Products::Engine {
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
};

// A product and its memory objects, which are pointed at the operands of each call. Calls use oneDNN's C
// interface, since the C++ one copies the objects into a new vector in every call.
struct Products::Primitive {
    dnnl::matmul matmul;
    std::vector<dnnl::memory> memories;
    std::vector<dnnl_exec_arg_t> arguments;
    bool depends_on_threads = false;  // the bits of its result on the number of threads

    void add(int argument, const dnnl::memory::desc& description, const dnnl::engine& engine) {
        memories.emplace_back(description, engine, nullptr);
        arguments.push_back({argument, memories.back().get()});
    }
    // Takes the operands in the order of add().
    void execute(const dnnl::stream& stream, std::initializer_list<std::byte*> operands) {
        std::size_t i = 0;
        for (std::byte* operand : operands) {
            if (operand != nullptr) memories[i++].set_data_handle(operand, stream);
        }
        check(i == memories.size(), "as many operands as the primitive was made for");
        dnnl::error::wrap_c_api(dnnl_primitive_execute(matmul.get(), stream.get(),
                                                       static_cast<int>(arguments.size()), arguments.data()),
                                "could not execute a matrix product");
    }
};

Products::Products(int threads) : threads_(threads) {
    avoid_wrong_products();
    engine_ = std::make_unique<Engine>();
}

Products::~Products() = default;

Products::Primitive& Products::primitive(const Matrix& c, const Matrix& a, const Matrix& b, Into into,
                                         bool has_bias, float scale) {
    const Key key = {c.rows,
                     c.columns,
                     a.columns,
                     a.row_stride,
                     a.column_stride,
                     b.row_stride,
                     b.column_stride,
                     c.row_stride,
                     c.column_stride,
                     static_cast<std::int64_t>(a.dtype) * 256 + static_cast<std::int64_t>(c.dtype),
                     into == Into::accumulate,
                     has_bias,
                     std::bit_cast<std::int32_t>(scale)};
    if (const auto found = primitives_.find(key); found != primitives_.end()) return *found->second;

    // Limits the memory for a caller whose shapes never repeat, such as generation token by token.
    constexpr std::size_t most = 1024;
    if (primitives_.size() >= most) primitives_.clear();

    dnnl::primitive_attr attributes;
    if (scale != 1) attributes.set_output_scales(0, {scale});
    if (into == Into::accumulate) {
        dnnl::post_ops after;
        after.append_sum(1.0F);
        attributes.set_post_ops(after);
    }
    const auto bias = has_bias ? dnnl::memory::desc({1, c.columns}, data_type(a.dtype), {c.columns, 1})
                               : dnnl::memory::desc();
    const dnnl::matmul::desc operation(description(a), description(b), bias, description(c));
    const dnnl::engine& engine = engine_->engine;
    auto made = std::make_unique<Primitive>();
    const dnnl::matmul::primitive_desc chosen(operation, attributes, engine);
    made->matmul = dnnl::matmul(chosen);
    // oneDNN's "gemm" may divide the sum of an element of c among threads. "brg", which needs AVX-512, does so for
    // long sums with a transposed a.
    const bool has_long_sums = a.row_stride == 1 && a.columns >= 2048;
    made->depends_on_threads = has_long_sums || !std::string_view(chosen.impl_info_str()).starts_with("brg");
    made->add(DNNL_ARG_SRC, description(a), engine);
    made->add(DNNL_ARG_WEIGHTS, description(b), engine);
    made->add(DNNL_ARG_DST, description(c), engine);
    if (has_bias) made->add(DNNL_ARG_BIAS, bias, engine);
    return *primitives_.emplace(key, std::move(made)).first->second;
}

void Products::multiply(const Matrix& c, const Matrix& a, const Matrix& b, Into into, const std::byte* bias,
                        float scale) {
    check(a.rows == c.rows && a.columns == b.rows && b.columns == c.columns, "the shapes of a product agree");
    check(a.dtype == b.dtype && (c.dtype == a.dtype || c.dtype == DType::fp32),
          "the dtypes of a product agree");
    check(a.columns > 0 || into == Into::accumulate, "a product that overwrites has at least one term");
    if (c.rows == 0 || c.columns == 0 || a.columns == 0) return;
    run(c, a, b, into, bias, scale, true);
}

void Products::run(const Matrix& c, const Matrix& a, const Matrix& b, Into into, const std::byte* bias,
                   float scale, bool may_be_divided) {
    const ThreadsOfOneDnn threads(threads_);
    Primitive& p = primitive(c, a, b, into, bias != nullptr, scale);
    if (p.depends_on_threads && may_be_divided) return run_tiles(c, a, b, into, bias, scale);
    p.execute(engine_->stream, {a.data, b.data, c.data, const_cast<std::byte*>(bias)});
    engine_->stream.wait();
}

void Products::run_tiles(const Matrix& c, const Matrix& a, const Matrix& b, Into into, const std::byte* bias,
                         float scale) {
    while (std::ssize(of_one_thread_) < threads_) of_one_thread_.push_back(std::make_unique<Products>(1));
    // A quarter of c's rows or columns, neither too small to be fast nor too large to share among threads.
    const auto part_of = [](std::int64_t n) {
        return std::clamp<std::int64_t>(round_up(divide_up(n, 4), 16), 32, 256);
    };
    const std::int64_t most_rows = part_of(c.rows), most_columns = part_of(c.columns);
    const std::int64_t across = divide_up(c.columns, most_columns);
    parallel_tasks(threads_, divide_up(c.rows, most_rows) * across, [&](std::int64_t tile, int thread) {
        const std::int64_t row = tile / across * most_rows, rows = std::min(most_rows, c.rows - row);
        const std::int64_t column = tile % across * most_columns;
        const std::int64_t columns = std::min(most_columns, c.columns - column);
        const std::byte* part_of_bias =
            bias == nullptr ? nullptr : bias + column * static_cast<std::int64_t>(size_of(a.dtype));
        of_one_thread_[static_cast<std::size_t>(thread)]->run(
            c.part(row, rows, column, columns), a.part(row, rows, 0, a.columns),
            b.part(0, b.rows, column, columns), into, part_of_bias, scale, false);
    });
}

}  // namespace llmc::cpu
