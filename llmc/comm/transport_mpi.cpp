// Messages over MPI (transport.h).
#include <fmt/format.h>
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "llmc/comm/machine_lock.h"
#include "llmc/comm/transport.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {
namespace {

// How long a failed rank waits for the reporting rank to end it.
constexpr std::chrono::seconds patience{10};
// How long a notice of a failed rank may be in flight.
constexpr std::chrono::milliseconds crossing_time{100};

// Tags of notices, which are messages of zero bytes: the rank has waited for long, such a wait is over, the
// rank has failed, the rank reports the failure. Tags of other messages begin at first_tag.
enum class Notice { waits, goes_on, failed, reports };
constexpr int tag_of(Notice notice) { return static_cast<int>(notice); }
constexpr int first_tag = 4;

// Throws a ProgrammingError with MPI's own text unless `code` is MPI_SUCCESS.
void check_mpi(int code, std::string_view call, SourceLocation where = SourceLocation::current()) {
    if (code == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(code, text.data(), &length);
    programming_error(fmt::format("{}: {}", call, text.data()), where);
}

class MpiMessages final : public Messages {
  public:
    explicit MpiMessages(int rank) : rank_(rank) {}

    void begin(int tag, std::string_view call) override {
        requests_.clear();
        expected_.clear();
        tag_ = first_tag + tag;
        call_ = call;
        open_ = 0;
    }

    void send(int to, const std::byte* data, std::size_t bytes) override {
        const int code =
            MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag_, MPI_COMM_WORLD, post(-1, 0));
        check_mpi(code, "MPI_Isend");
    }

    void recv(int from, std::byte* data, std::size_t bytes) override {
        const int count = static_cast<int>(bytes);
        check_mpi(MPI_Irecv(data, count, MPI_BYTE, from, tag_, MPI_COMM_WORLD, post(from, count)),
                  "MPI_Irecv");
    }

    bool poll() override {
        if (open_ == 0) return false;
        int done = 0;
        const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &done,
                                      indices_.data(), statuses_.data());
        if (code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
        for (int i = 0; i < done; ++i) {
            const auto k = static_cast<std::size_t>(i);
            if (code == MPI_ERR_IN_STATUS) check_mpi(statuses_[k].MPI_ERROR, call_);
            check_arrived(statuses_[k], expected_[static_cast<std::size_t>(indices_[k])]);
        }
        open_ -= static_cast<std::size_t>(done);
        return done > 0;
    }

    std::size_t open() const override { return open_; }
    bool is_done(std::size_t message) const override { return requests_[message] == MPI_REQUEST_NULL; }

  private:
    struct Expected {
        int from;  // -1 for a message that is sent
        int bytes;
    };

    MPI_Request* post(int from, int bytes) {
        requests_.push_back(MPI_REQUEST_NULL);
        expected_.push_back({from, bytes});
        indices_.resize(requests_.size());
        statuses_.resize(requests_.size());
        ++open_;
        return &requests_.back();
    }

    // MPI accepts a message that is shorter than its buffer. Here it means that two ranks disagree on a size.
    void check_arrived(const MPI_Status& status, const Expected& expected) const {
        if (expected.from < 0) return;
        int bytes = 0;
        check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
        if (bytes == expected.bytes) return;
        programming_error(fmt::format("{}: rank {} sent {} bytes where rank {} expects {}", call_,
                                      expected.from, bytes, rank_, expected.bytes));
    }

    int rank_;
    int tag_ = 0;
    std::string_view call_;
    std::vector<MPI_Request> requests_;
    std::vector<Expected> expected_;  // one per request
    std::vector<int> indices_;        // indices of finished requests
    std::vector<MPI_Status> statuses_;
    std::size_t open_ = 0;
};

class MpiTransport final : public Transport {
  public:
    MpiTransport() {
        // Without this, Open MPI prints eight lines of its own after the one line of a failing job.
        setenv("OMPI_MCA_orte_execute_quiet", "1", 0);
        // A process that MPI considers to be started alone then needs no daemon.
        setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
        int provided = 0;
        check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
        check(provided >= MPI_THREAD_SERIALIZED, "MPI supports calls from several threads, one at a time");
        check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
        check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
        int* largest = nullptr;
        int found = 0;
        check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
        check(found != 0, "MPI gives its largest tag");
        largest_tag_ = *largest - first_tag;
        long_waits_.resize(static_cast<std::size_t>(size_));
        require_peers();
    }

    int rank() const override { return rank_; }
    int size() const override { return size_; }
    int largest_tag() const override { return largest_tag_; }

    std::unique_ptr<Messages> messages() override { return std::make_unique<MpiMessages>(rank_); }

    void tell_waiting(bool waits) override { tell_others(waits ? Notice::waits : Notice::goes_on); }
    bool is_waiting(int rank) override {
        hear();
        return long_waits_[static_cast<std::size_t>(rank)] > 0;
    }
    // Notices of the two kinds may overtake each other, so this counts them.
    void hear() override {
        receive(Notice::waits, 1);
        receive(Notice::goes_on, -1);
    }

    // The first rank that fails reports. On one machine a lock decides which rank that is, until that rank
    // has ended. If notices of several machines cross, the lowest of these ranks reports, unless another
    // already does.
    bool reports_failure(std::span<const int> /*silent*/) override {
        if (size_ == 1) return true;
        if (!first_to_fail_.claim() || lowest(Notice::failed) < size_) return false;
        tell_others(Notice::failed);
        const auto end = std::chrono::steady_clock::now() + crossing_time;
        do {
            if (lowest(Notice::reports) < size_) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        } while (std::chrono::steady_clock::now() < end);
        if (lowest(Notice::failed) < rank_) return false;
        tell_others(Notice::reports);
        return true;
    }

    void finish() override { MPI_Finalize(); }

    // If a process returned a nonzero status, mpirun would print a banner and a line for each process.
    [[noreturn]] void end(int status) override {
        std::fflush(stdout);
        if (rank_ != 0) std::this_thread::sleep_for(patience);  // rank 0 ends this process
        MPI_Abort(MPI_COMM_WORLD, status);
        std::_Exit(status);
    }

    void end_if_lost() override {}

    [[noreturn]] void abort() override {
        MPI_Abort(MPI_COMM_WORLD, 1);
        std::_Exit(1);
    }

    void give_way() override { std::this_thread::sleep_for(patience); }

  private:
    void tell_others(Notice notice) {
        for (int rank = 0; rank < size_; ++rank) {
            if (rank == rank_) continue;
            MPI_Request request = MPI_REQUEST_NULL;
            check_mpi(MPI_Isend(nullptr, 0, MPI_BYTE, rank, tag_of(notice), MPI_COMM_WORLD, &request),
                      "MPI_Isend");
            check_mpi(MPI_Request_free(&request), "MPI_Request_free");
        }
    }

    // Receives all notices of a kind that have arrived. Each adds `change` to the sender's count of long
    // waits.
    void receive(Notice notice, int change) {
        const int tag = tag_of(notice);
        while (true) {
            int there = 0;
            MPI_Status status{};
            check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &there, &status), "MPI_Iprobe");
            if (there == 0) return;
            check_mpi(
                MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE),
                "MPI_Recv");
            long_waits_[static_cast<std::size_t>(status.MPI_SOURCE)] += change;
        }
    }

    // The lowest other rank that has sent a notice; the number of ranks if none has.
    int lowest(Notice notice) {
        for (int rank = 0; rank < size_; ++rank) {
            int told = 0;
            if (rank != rank_)
                check_mpi(MPI_Iprobe(rank, tag_of(notice), MPI_COMM_WORLD, &told, MPI_STATUS_IGNORE),
                          "MPI_Iprobe");
            if (told != 0) return rank;
        }
        return size_;
    }

    // With a launcher that this MPI does not understand, each process would train on its own, into the same
    // files.
    void require_peers() const {
        for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
            const char* value = std::getenv(name);
            if (size_ > 1 || value == nullptr || whole_number<int>(value).value_or(1) <= 1) continue;
            MPI_Finalize();
            user_error(
                "the launcher started {} processes ({}), but MPI sees one, because it does not support the "
                "launcher's PMI; start them with mpirun, or with srun --mpi=none and RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT",
                value, name);
        }
    }

    int rank_ = 0;
    int size_ = 1;
    int largest_tag_ = 0;
    std::vector<int> long_waits_;  // unfinished long waits by rank
    MachineLock first_to_fail_{"failed"};
};

}  // namespace

bool has_mpi() { return true; }

std::unique_ptr<Transport> join_mpi_job() { return std::make_unique<MpiTransport>(); }

}  // namespace llmc
