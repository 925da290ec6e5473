// Checkpoints on disk: what a cut of the power leaves, damage, disks that are full, and how often files are read.
#include "llmc/io/checkpoint.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/io/files.h"
#include "mpi_test.h"
#include "recorded_files.h"
#include "trainer_run.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;
using test::FileCall;
using test::FileRecorder;
using test::world;

// A folder that all ranks use.
class SharedFolder {
  public:
    SharedFolder() {
        path_ = text_of_root(world(), [] {
            std::string name = (fs::temp_directory_path() / "llmc-checkpoint-XXXXXX").string();
            if (mkdtemp(name.data()) == nullptr) throw UserError("no temporary directory");
            return name;
        });
    }
    ~SharedFolder() {
        world().barrier();
        if (world().rank() == 0) fs::remove_all(path_);
    }
    SharedFolder(const SharedFolder&) = delete;
    SharedFolder& operator=(const SharedFolder&) = delete;

    fs::path operator/(const char* name) const { return path_ / name; }

  private:
    fs::path path_;
};

fs::path save(test::TrainerRun& run, const fs::path& out_dir, std::int64_t step,
              const std::string& mark = "run") {
    Trainer& trainer = run.trainer();
    Progress progress = trainer.progress();
    progress.step = step;
    return save_checkpoint(out_dir,
                           {.run = mark,
                            .lineage = "lineage",
                            .progress = progress,
                            .configuration = "{}",
                            .data = "{}",
                            .device_choices = trainer.algorithms(),
                            .tokenizer = {{"tokenizer.json", "{}"}}},
                           trainer.store(), trainer.transfer());
}

// The calls of all ranks, in their order, on rank 0.
std::vector<FileCall> calls_of_ranks(const std::vector<FileCall>& own) {
    std::vector<FileCall> all;
    for (int rank = 0; rank < world().size(); ++rank) {
        nlohmann::json list = nlohmann::json::array();
        for (const FileCall& call : own)
            list.push_back({static_cast<int>(call.kind), call.time, call.path,
                            nlohmann::json::binary({call.more.begin(), call.more.end()})});
        const std::vector<std::uint8_t> packed = nlohmann::json::to_msgpack(list);
        const std::string text = broadcast_text(world(), {packed.begin(), packed.end()}, rank);
        for (const auto& call : nlohmann::json::from_msgpack(text.begin(), text.end())) {
            const auto& more = call[3].get_binary();
            all.push_back({static_cast<FileCall::Kind>(call[0].get<int>()), call[1], call[2],
                           std::string(more.begin(), more.end())});
        }
    }
    std::ranges::stable_sort(all, {}, &FileCall::time);
    return all;
}

// Each folder with the name of a checkpoint is whole, and the newest whole one is that of `mark` or, before the save is
// done, an earlier one.
void expect_whole(const fs::path& scratch, bool has_earlier, bool is_done, const std::string& mark) {
    for (const fs::directory_entry& entry : fs::directory_iterator(scratch)) {
        const fs::path& path = entry.path();
        if (is_checkpoint_name(path.filename().string()) && path.extension().empty()) {
            EXPECT_NO_THROW(verify_checkpoint(path)) << path;
        }
    }
    const std::optional<CheckpointInfo> found = newest_whole(readable_checkpoints(scratch));
    EXPECT_TRUE(found || !(has_earlier || is_done));
    if (is_done && found) {
        EXPECT_EQ(found->run, mark);
    }
}

struct Cut {
    bool has_earlier, replaces, can_exchange;
};
class PowerCut : public testing::TestWithParam<Cut> {};

TEST_P(PowerCut, LeavesAWholeCheckpoint) {
    const Cut& cut = GetParam();
    if (world().size() > 2) GTEST_SKIP() << "two processes suffice";
    test::TrainerRun run({"--layers=1", "--channels=16"});
    const SharedFolder folder;
    const fs::path out_dir = folder / "out", before = folder / "before", scratch = folder / "scratch";
    if (world().rank() == 0) fs::create_directory(out_dir);
    world().barrier();
    if (cut.has_earlier) save(run, out_dir, 1, "earlier");
    if (world().rank() == 0) fs::copy(out_dir, before, fs::copy_options::recursive);
    test::let_names_be_exchanged(cut.can_exchange);
    const FileRecorder recorder(out_dir);
    const fs::path saved = save(run, out_dir, cut.replaces ? 1 : 2, "newer");
    test::let_names_be_exchanged(true);
    const std::vector<FileCall> calls = calls_of_ranks(recorder.calls());
    if (world().rank() != 0) return;
    EXPECT_EQ(verify_checkpoint(saved).step, cut.replaces ? 1 : 2);
    // Every rank writes.
    const auto is_creation = [](const FileCall& call) { return call.kind == FileCall::Kind::create; };
    EXPECT_GE(std::ranges::count_if(calls, is_creation), 3 * world().size() + 2);
    std::size_t cuts = 0;
    test::for_each_power_cut(before, calls, scratch, [&](std::size_t count, const std::string& lost) {
        SCOPED_TRACE(testing::Message() << "after " << count << " of " << calls.size()
                                        << " calls, without the unsynced names in" << lost);
        expect_whole(scratch, cut.has_earlier, count == calls.size(), "newer");
        ++cuts;
    });
    EXPECT_GT(cuts, calls.size());
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, PowerCut,
                         testing::Values(Cut{false, false, true}, Cut{true, false, true},
                                         Cut{true, true, true}, Cut{true, true, false}));

// The message with which a load fails on all ranks; empty if it does not.
std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const UserError& fault) {
        return fault.what();
    }
    return "";
}

std::vector<fs::path> files_in(const fs::path& folder) {
    std::vector<fs::path> files;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
        if (entry.is_regular_file()) files.push_back(entry.path());
    std::ranges::sort(files);
    return files;
}

TEST(Checkpoint, DamageOfEachFileIsFound) {
    if (world().size() > 1) GTEST_SKIP() << "one process verifies";
    test::TrainerRun run({});
    const SharedFolder folder;
    const fs::path saved = save(run, folder / "out", 1);
    ASSERT_EQ(error_of([&] { verify_checkpoint(saved); }), "");
    const auto expect_damage = [&](const fs::path& file, const std::string& what) {
        EXPECT_NE(error_of([&] { verify_checkpoint(saved); }), "") << file << ": " << what;
        if (file.parent_path() != saved) return;  // a tokenizer's file is read by itself
        EXPECT_NE(error_of([&] {
                      load_checkpoint(read_checkpoint(saved), run.trainer().store(),
                                      run.trainer().transfer());
                  }),
                  "")
            << file << ": " << what;
    };
    const std::vector<fs::path> files = files_in(saved);
    EXPECT_EQ(files.size(), 5u);
    for (const fs::path& file : files) {
        const std::string text = read_file(file);
        for (std::size_t place = 0; place < text.size(); place += 4096) {
            // A bit of each page, at another place of it each time.
            std::string damaged = text;
            damaged[std::min(place + place / 4096 * 37 % 4096, text.size() - 1)] ^= 1 << (place / 4096 % 8);
            write_file(file, damaged);
            expect_damage(file, "a bit in page " + std::to_string(place / 4096));
        }
        for (const std::size_t size : {std::size_t{0}, text.size() / 2, text.size() - 1}) {
            write_file(file, text.substr(0, size));
            expect_damage(file, "cut to " + std::to_string(size));
        }
        write_file(file, text + '\0');
        expect_damage(file, "longer");
        fs::remove(file);
        expect_damage(file, "missing");
        for (const fs::path& other : files) {
            if (other == file) continue;
            fs::copy_file(other, file);
            expect_damage(file, "swapped with " + other.string());
            fs::remove(file);
        }
        write_file(file, text);
    }
    EXPECT_EQ(error_of([&] { verify_checkpoint(saved); }), "");
}

// With several processes: the rank that reads a damaged block tells the others.
TEST(Checkpoint, AllRanksGetTheErrorOfTheOneThatFindsDamage) {
    test::TrainerRun run({"--channels=128"});
    const SharedFolder folder;
    const fs::path saved = save(run, folder / "out", 1);
    if (world().rank() == 0) {
        const fs::path file = saved / fmt::format("state-{:05}-1.safetensors", world().size() - 1);
        std::string text = read_file(file);
        text[text.size() - 5] ^= 4;
        write_file(file, text);
    }
    world().barrier();
    const std::string error = error_of(
        [&] { load_checkpoint(read_checkpoint(saved), run.trainer().store(), run.trainer().transfer()); });
    EXPECT_NE(error.find("does not have its checksum"), std::string::npos) << error;
    EXPECT_EQ(broadcast_text(world(), error, 0), error);
}

TEST(Checkpoint, AFullDiskOfAnyRankIsAnErrorOfAllAndLeavesTheEarlierOne) {
    test::TrainerRun run({});
    const SharedFolder folder;
    const fs::path out_dir = folder / "out", earlier = save(run, out_dir, 1);
    const FileRecorder recorder(out_dir);
    const std::vector<std::string> places = {fmt::format("weights-{:05}-1", world().size() - 1),
                                             fmt::format("checksums-{:05}", world().size() / 2), "manifest",
                                             "tokenizer.json"};
    for (const std::string& full : places) {
        test::let_writes_fail([&](const std::string& path) { return path.find(full) != std::string::npos; });
        const std::string error = error_of([&] { save(run, out_dir, 2); });
        EXPECT_NE(error.find(full), std::string::npos) << error;
        EXPECT_NE(error.find("No space left on device"), std::string::npos) << error;
        EXPECT_EQ(broadcast_text(world(), error, 0), error);
        if (world().rank() == 0) {
            EXPECT_EQ(std::distance(fs::directory_iterator(out_dir), {}), 1) << full;
            EXPECT_EQ(error_of([&] { verify_checkpoint(earlier); }), "");
        }
        world().barrier();
    }
    test::let_writes_fail({});
    EXPECT_EQ(error_of([&] { save(run, out_dir, 2); }), "");
}

// The headers apart, all ranks together read each byte once.
TEST(Checkpoint, IsReadOnce) {
    test::TrainerRun run({"--channels=384", "--zero-stage=1"});
    const SharedFolder folder;
    const fs::path saved = save(run, folder / "out", 1);
    const FileRecorder recorder(saved);
    load_checkpoint(read_checkpoint(saved), run.trainer().store(), run.trainer().transfer());
    const nlohmann::json own = recorder.read();
    std::map<std::string, std::uint64_t> read;
    std::size_t readers = 0;
    for (int rank = 0; rank < world().size(); ++rank) {
        const auto of_rank = nlohmann::json::parse(broadcast_text(world(), own.dump(), rank))
                                 .get<std::map<std::string, std::uint64_t>>();
        if (!of_rank.empty()) ++readers;
        for (const auto& [file, bytes] : of_rank) read[file] += bytes;
    }
    if (world().rank() != 0) return;
    EXPECT_EQ(readers, static_cast<std::size_t>(world().size()));
    std::uint64_t all = 0;
    for (const fs::path& file : files_in(saved)) {
        if (file.extension() != ".safetensors") continue;
        const std::uint64_t bytes = fs::file_size(file);
        std::uint64_t header = 0;
        std::memcpy(&header, read_file(file).data(), sizeof(header));
        const std::uint64_t of_header = sizeof(header) + std::min<std::uint64_t>(4096, bytes) + header;
        EXPECT_EQ(read[file.filename().string()], bytes + of_header) << file;
        all += bytes;
    }
    EXPECT_GT(all, 8 * checksum_block);
}

}  // namespace
}  // namespace llmc
