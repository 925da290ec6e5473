// A model that is exported as a folder of several files.
#include "llmc/io/export_folder.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/io/stored_tensors.h"
#include "mpi_test.h"
#include "trainer_run.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

TEST(ExportedFolder, DividesTheWeightsAmongFilesWithAnIndex) {
    constexpr std::uint64_t most_bytes = 4096;
    test::TrainerRun run({});
    const ParameterStore& store = run.trainer().store();
    UnitTransfer& transfer = run.trainer().transfer();
    std::string place = (fs::temp_directory_path() / "llmc-export-XXXXXX").string();
    ASSERT_NE(mkdtemp(place.data()), nullptr);
    const fs::path folder = fs::path(place) / "model";
    save_folder(folder, store, transfer, {.config = "{}", .dtype = "fp32", .shard_bytes = most_bytes});

    const std::vector<SafetensorsEntry> expected = weights_table(store, transfer, "F32");
    std::vector<float> read;
    if (transfer.is_root()) {
        EXPECT_EQ(find_tensors(folder).tensors().size(), expected.size());
        const auto index = nlohmann::json::parse(read_file(folder / "model.safetensors.index.json"));
        std::uint64_t bytes = 0;
        for (const SafetensorsEntry& entry : expected) bytes += entry.bytes();
        EXPECT_EQ(index["metadata"]["total_size"], bytes);
        EXPECT_EQ(index["weight_map"].size(), expected.size());
        int shards = 0;
        for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
            if (file.path().extension() != ".safetensors") continue;
            ++shards;
            // A tensor that is larger has a file of its own.
            const SafetensorsReader reader(file.path());
            std::uint64_t in_file = 0;
            for (const SafetensorsEntry& entry : reader.entries()) in_file += entry.bytes();
            EXPECT_TRUE(in_file <= most_bytes || reader.entries().size() == 1) << file.path();
        }
        EXPECT_GT(shards, 2);
    }
    collect_weights(store, transfer, {}, [&](const std::string& name, std::span<const float> values) {
        read.resize(values.size());
        const StoredTensors stored = find_tensors(folder);
        const StoredBox& box = stored.tensors().at(name).boxes.front();
        SafetensorsReader(stored.files()[box.file].path).read(name, std::span<float>(read));
        EXPECT_TRUE(std::ranges::equal(read, values)) << name;
    });
    fs::remove_all(place);
}

}  // namespace
}  // namespace llmc
