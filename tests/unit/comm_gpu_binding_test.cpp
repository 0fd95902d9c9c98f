// comm/gpu_binding and core/gpu_names: the table of ranks and GPUs, and GPUs that ranks share.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "comm/gpu_binding.h"
#include "core/gpu_names.h"

namespace kdtree {
namespace {

GpuOfRank gpu_of(int rank, const std::string& host, const std::string& bus_id) {
  return {.rank = rank, .host = host, .pci_bus_id = bus_id, .uuid = "GPU-1", .name = "Card"};
}

std::string error_of(const std::vector<GpuOfRank>& binding) {
  try {
    require_gpu_for_each_rank(binding);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(GpuBinding, GathersTheOwnRow) {
  const auto group = make_self_process_group();
  GpuOfRank own = gpu_of(7, "", "0000:3B:00.0");
  own.name = std::string(100, 'n');
  own.numa_node = 1;
  own.device_index = 3;
  const std::vector<GpuOfRank> binding = gather_gpu_binding(*group, own);
  ASSERT_EQ(binding.size(), 1U);
  EXPECT_EQ(binding[0].rank, 0);
  EXPECT_EQ(binding[0].host, group->host_name());
  EXPECT_EQ(binding[0].pci_bus_id, "0000:3B:00.0");
  EXPECT_EQ(binding[0].uuid, "GPU-1");
  EXPECT_EQ(binding[0].name, std::string(63, 'n'));
  EXPECT_EQ(binding[0].numa_node, 1);
  EXPECT_EQ(binding[0].device_index, 3);
}

TEST(GpuBinding, TableHasALineForEachRank) {
  std::vector<GpuOfRank> binding{gpu_of(0, "a-long-host-name", "0000:3B:00.0"),
                                 gpu_of(1, "b", "0000:5E:00.0")};
  binding[1].numa_node = 1;
  EXPECT_EQ(format_gpu_binding(binding),
            "rank  host              device  PCI bus id      UUID                                  "
            "    NUMA  name\n"
            "   0  a-long-host-name       0  0000:3B:00.0    GPU-1                                 "
            "       ?  Card\n"
            "   1  b                      0  0000:5E:00.0    GPU-1                                 "
            "       1  Card");
}

TEST(GpuBinding, AGpuForEachRankIsFine) {
  // The same bus id on two hosts means two GPUs.
  EXPECT_EQ(error_of({gpu_of(0, "a", "0000:3B:00.0"), gpu_of(1, "a", "0000:5E:00.0"),
                      gpu_of(2, "b", "0000:3B:00.0")}),
            "");
}

TEST(GpuBinding, SharedGpusAreNamedWithTheWayOut) {
  const std::string error =
      error_of({gpu_of(0, "a", "0000:3B:00.0"), gpu_of(1, "a", "0000:5E:00.0"),
                gpu_of(2, "a", "0000:3B:00.0"), gpu_of(3, "a", "0000:5E:00.0")});
  EXPECT_NE(error.find("ranks 0, 2 share GPU 0000:3B:00.0 of a; ranks 1, 3 share GPU 0000:5E:00.0"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("--communicator mpi"), std::string::npos) << error;
}

TEST(GpuNames, UuidIsWrittenAsNvidiaSmiDoes) {
  std::array<std::uint8_t, 16> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(0x11 * i);
  }
  EXPECT_EQ(format_gpu_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
}

TEST(GpuNames, NumaNodeComesFromSysfs) {
  const std::filesystem::path devices = std::filesystem::path(testing::TempDir()) /
                                        ("kdtree_pci_devices_" + std::to_string(getpid()));
  std::filesystem::create_directories(devices / "0000:3b:00.0");
  std::ofstream(devices / "0000:3b:00.0" / "numa_node") << "1\n";
  EXPECT_EQ(numa_node_of_pci_device("0000:3B:00.0", devices), 1);
  EXPECT_EQ(numa_node_of_pci_device("0000:5E:00.0", devices), -1);
  std::filesystem::remove_all(devices);
}

}  // namespace
}  // namespace kdtree
