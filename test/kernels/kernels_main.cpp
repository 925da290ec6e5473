// The main program of the kernels' tests. On the executor there are two: with the tests of test/kernels, and with the
// kernel lab (dev/), whose variants it compares with their references. Compiled for a GPU, one program has both, and
// also times the lab.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dev/lab/gpu.h"
#include "dev/lab/session.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/device/cuda/launch.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {

// KERNEL_SEED=N is the seed of the inputs and of the order of threads. With seed 0, threads run in the order
// of their numbers; the results of the tests then do not reveal missing barriers.
std::uint64_t seed() {
    static const std::uint64_t value = [] {
        const char* given = std::getenv("KERNEL_SEED");
        if (given == nullptr) return std::uint64_t{std::random_device{}()} + 1;
        const auto number = llmc::whole_number<std::uint64_t>(given);
        if (!number) llmc::user_error("KERNEL_SEED={} is no seed; give a whole number, 0 or more", given);
        return *number;
    }();
    return value;
}

std::vector<LaunchContext> launch_contexts() {
#if defined(__CUDACC__) || defined(SIMT_THREAD)  // races are the same on all chips
    return {lab::gpu_context()};
#else
    return {{llmc::cuda::sm_80}, {llmc::cuda::sm_86}, {llmc::cuda::sm_90}};
#endif
}

void synchronize() { lab::synchronize(); }

#ifdef __CUDACC__
UnreportedKernels::UnreportedKernels() {}
UnreportedKernels::~UnreportedKernels() {}
#else
UnreportedKernels::UnreportedKernels() { simt::options().report.clear(); }
UnreportedKernels::~UnreportedKernels() {
    simt::options().report = simt::read_kernel_report(simt::kernel_report_path());
}
#endif

namespace {

// The lab's context. The tests for races use a chip with few multiprocessors, on which a block of a small
// shape has several pieces of work.
LaunchContext lab_context() {
    LaunchContext on = lab::gpu_context();
#ifdef SIMT_THREAD
    on.chip.multiprocessors = 8;
#endif
    return on;
}

#ifndef __CUDACC__
// The greatest number in the name of a launched kernel of llmc/: 3 for llmc::cuda::gelu_forward_kernel3<float>.
class GreatestNumber : public llmc::cuda::LaunchObserver {
  public:
    void launched(const llmc::cuda::LaunchRecord& record) override {
        constexpr std::string_view name_end = "_kernel";
        const std::string symbol = simt::symbol_of(record.kernel);
        const std::size_t place = symbol.find(name_end);
        if (!symbol.starts_with("_ZN4llmc4cuda") || place == std::string::npos) return;
        value = std::max(value, std::stoi(symbol.substr(place + name_end.size())));
    }
    int value = 0;
};

bool is_best(const lab::Operation& operation, const lab::Variant& variant, llmc::DType dtype) {
    for (const lab::Variant& other : operation.variants) {
        if (other.number > variant.number && has_variant(operation, other, dtype)) return false;
    }
    return true;
}
#endif

// A variant of an operation in a dtype. The best variant has the number in the name of llmc's kernel.
class LabTest : public testing::Test {
  public:
    LabTest(const lab::Operation& operation, const lab::Variant& variant, llmc::DType dtype)
        : operation_(operation), variant_(variant), dtype_(dtype) {}

    void TestBody() override {
        LaunchContext on = lab_context();
#ifndef __CUDACC__
        GreatestNumber number;
        on.observer = &number;
#endif
        const auto result = check_variant(operation_, variant_, dtype_, on, seed());
        EXPECT_TRUE(result.good()) << result.first_failure();
#ifndef __CUDACC__
        if (!is_best(operation_, variant_, dtype_)) return;
        EXPECT_EQ(number.value, variant_.number) << "of llmc's kernel, which is the best variant";
#endif
    }

  private:
    const lab::Operation& operation_;
    const lab::Variant& variant_;
    llmc::DType dtype_;
};

#ifndef __CUDACC__
// The last test: each kernel of the lab must have run in a test before it, in several blocks. Otherwise no sanitizer
// would check its races and accesses. (test/python/test_more_ops.py has those of the trainer.)
class EveryKernel : public testing::Test {
  public:
    void TestBody() override {
        const auto& tests = *testing::UnitTest::GetInstance();
        if (tests.test_to_run_count() < tests.total_test_count()) GTEST_SKIP() << "not all tests ran";
        std::set<std::string> reported;
        for (const auto& [architecture, kernels] : simt::options().report) {
            for (const auto& [symbol, figures] : kernels) reported.insert(symbol);
        }
        if (reported.empty()) GTEST_SKIP() << "no compiler's report here";
        for (const std::string& symbol : reported) {
            // The lab also instantiates kernels of llmc/ that no variant launches.
            if (!symbol.starts_with("_ZN3lab")) continue;
            const auto launched = simt::launched_kernels().find(symbol);
            if (launched == simt::launched_kernels().end()) {
                ADD_FAILURE() << "no test runs " << symbol;
            } else {
                EXPECT_GT(launched->second, 1u) << "no test runs several blocks of " << symbol;
            }
        }
    }
};
#endif

void register_lab() {
    for (const lab::Operation& operation : lab::operations()) {
        for (const lab::Variant& variant : operation.variants) {
            for (const llmc::DType dtype : operation.dtypes) {
                if (!has_variant(operation, variant, dtype)) continue;
                const std::string name =
                    "kernel" + std::to_string(variant.number) + "_" + std::string(name_of(dtype));
                testing::RegisterTest(
                    ("Lab." + operation.name).c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                    [&operation, &variant, dtype] { return new LabTest(operation, variant, dtype); });
            }
        }
    }
}

}  // namespace
}  // namespace kernel_test

#ifdef SIMT_THREAD
// Called by ThreadSanitizer at its start: the first race ends the program.
extern "C" const char* __tsan_default_options() { return "halt_on_error=1"; }
#endif

// Times the whole lab or one operation: `kernels --time FILE [OPERATION]` writes a line of JSON per timing to
// FILE. `--time-best FILE` times only llmc's own kernels, in bf16, and the libraries.
static bool time_lab(const std::string& json, std::string_view only, bool best_alone) {
    bool good = true, is_any = false;
    for (const lab::Operation& operation : lab::operations()) {
        if (!only.empty() && operation.name != only) continue;
        is_any = true;
        for (const llmc::DType dtype : operation.dtypes) {
            if (best_alone && dtype != llmc::DType::bf16) continue;
            lab::SessionOptions options;
            options.dtype = name_of(dtype);
            options.seed = kernel_test::seed();
            options.json = json;
            if (best_alone) {
                options.variants = {operation.variants.back().number};
                options.check = false;
            }
            good = lab::run_session(operation, options) && good;
        }
    }
    if (!is_any) llmc::user_error("the lab has no operation {}", only);
    return good;
}

// Measures the GPU's rates: `kernels --rates` prints those of a copy and of a large product, as a line of
// JSON.
static void print_rates() {
    std::printf("{\"copy_bytes_a_second\": %.6g, \"product_flops_a_second\": %.6g}\n", lab::copy_bandwidth(),
                lab::product_rate());
}

static int run_without_tests(int argc, char** argv) {
    if (argc == 2) {
        print_rates();
        return 0;
    }
    return time_lab(argv[2], argc == 4 ? argv[3] : "", std::string_view(argv[1]) == "--time-best") ? 0 : 1;
}

int main(int argc, char** argv) try {
    const std::string_view first = argc > 1 ? argv[1] : "";
    if ((argc == 3 && (first == "--time" || first == "--time-best")) || (argc == 4 && first == "--time") ||
        (argc == 2 && first == "--rates"))
        return run_without_tests(argc, argv);
    testing::InitGoogleTest(&argc, argv);
    kernel_test::register_lab();
    std::printf("KERNEL_SEED=%llu\n", static_cast<unsigned long long>(kernel_test::seed()));
#ifndef __CUDACC__
    lab::use_executor(kernel_test::seed());
    if (!lab::operations().empty())
        testing::RegisterTest("EveryKernel", "RanInSomeTest", nullptr, nullptr, __FILE__, __LINE__,
                              [] { return new kernel_test::EveryKernel; });
#endif
    return RUN_ALL_TESTS();
} catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
}
