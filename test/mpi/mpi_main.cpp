// The main program of test/mpi (see mpi_test.h).

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/launcher.h"
#include "mpi_test.h"

namespace llmc::test {
namespace {

// A test that leaves a rank waiting ends the job with a message.
constexpr std::chrono::seconds timeout{60};

std::unique_ptr<Job>& job() {
    static std::unique_ptr<Job> job;
    return job;
}

// After each test, all ranks exchange whether they failed. This uses a separate communicator, so that a test
// that one rank left early does not receive these messages.
class Agreement : public testing::EmptyTestEventListener {
  public:
    Agreement() : ranks_(world().split(0, world().rank())) {}

    // Prints at once, because a failure on one rank may leave the others waiting for it.
    void OnTestPartResult(const testing::TestPartResult& result) override {
        if (!result.failed() || ranks_->rank() == 0) return;
        fmt::print(stderr, "rank {}: {}:{}: Failure\n{}\n", ranks_->rank(),
                   result.file_name() ? result.file_name() : "?", result.line_number(), result.message());
    }

    void OnTestEnd(const testing::TestInfo& test) override {
        std::vector<std::int32_t> failed(static_cast<std::size_t>(ranks_->size()));
        const Tensor all{reinterpret_cast<std::byte*>(failed.data()), DType::int32, {ranks_->size()}};
        const Tensor own = all.slice(ranks_->rank(), 1);
        *own.as<std::int32_t>() = test.result()->Failed() ? 1 : 0;
        ranks_->all_gather(all, own);
        if (ranks_->rank() != 0) return;
        std::string others;
        for (int rank = 1; rank < ranks_->size(); ++rank)
            if (failed[static_cast<std::size_t>(rank)] != 0) others += fmt::format(" {}", rank);
        if (!others.empty()) ADD_FAILURE() << "failed on rank" << others << " (printed above)";
    }

  private:
    std::unique_ptr<Communicator> ranks_;
};

int run_tests() {
    if (world().rank() != 0 && testing::GTEST_FLAG(list_tests)) return 0;
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    if (world().rank() != 0) {
        delete listeners.Release(listeners.default_result_printer());
        delete listeners.Release(listeners.default_xml_generator());
    }
    // Test ends are reported to the last listener first, so the report includes what it adds.
    listeners.Append(new Agreement);
    const int status = RUN_ALL_TESTS();
    return world().rank() == 0 ? status : 0;
}

}  // namespace

HostCommunicator& world() { return job()->world(); }
Transport& transport() { return job()->transport(); }

}  // namespace llmc::test

int main(int argc, char** argv) {
    if (const auto status = llmc::launch_processes(argc, argv)) return *status;
    llmc::accept_stop_signals();  // ends this program, which does not handle it
    testing::InitGoogleTest(&argc, argv);
    // Ranks share the cores. With several threads each, teams of threads would wait for those of other ranks.
    omp_set_num_threads(1);
    auto& job = llmc::test::job();
    job = std::make_unique<llmc::Job>(llmc::ExchangeOptions{.timeout = llmc::test::timeout});
    const int status = llmc::test::run_tests();
    job.reset();
    return status;
}
