#include "llmc/train/background_save.h"

#include <omp.h>

#include <chrono>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/core/error.h"

namespace llmc {

BackgroundSave::BackgroundSave(CheckpointSave save, const CheckpointCopy& copy, Communicator& world)
    : save_(std::move(save)), world_(world) {
    start([this, &copy] {
        save_.write([&](int unit, Kept kept, const ElementRange& run, std::span<std::byte> bytes) {
            if (is_cancelled_) user_error("the run ends");
            copy.read(unit, kept, run, bytes);
        });
    });
}

BackgroundSave::~BackgroundSave() {
    is_cancelled_ = true;
    work_.wait();
}

void BackgroundSave::start(const std::function<void()>& work) {
    const auto error = [work]() -> std::string {
        try {
            work();
            return "";
        } catch (const std::bad_alloc&) {
            return "there is no memory to write the checkpoint with";
        } catch (const std::exception& fault) {
            return fault.what();
        }
    };
    try {
        work_ = std::async(std::launch::async, [error] {
            omp_set_num_threads(1);  // the others compute
            return error();
        });
    } catch (const std::system_error&) {
        work_ = std::async(std::launch::deferred, error);
        work_.wait();
    }
}

Session::Done BackgroundSave::done() const {
    if (work_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return {};
    return work_.get().empty() ? Session::Done{1, 0} : Session::Done{0, 1};
}

bool BackgroundSave::advance(const Session::Done& sums) {
    if (sums.well + sums.failed < world_.size()) return false;
    if (sums.failed > 0) {
        save_.abandon();
        together(world_, [&] {
            if (const std::string& error = work_.get(); !error.empty()) throw UserError(error);
        });
    }
    if (is_completing_) return true;
    is_completing_ = true;
    save_.gather(world_);
    if (world_.rank() == 0) start([this] { save_.complete(); });
    return false;
}

void BackgroundSave::wait() {
    Session::Done sums;
    do {
        // All answer meanwhile, however long one writes.
        work_.wait_for(std::chrono::seconds(1));
        sums = done();
        world_.all_reduce({reinterpret_cast<std::byte*>(&sums), DType::fp64, {2}});
    } while (!advance(sums));
}

}  // namespace llmc
