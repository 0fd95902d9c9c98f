// What a GPU is called, and where it sits, in the form that nvidia-smi and sysfs use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace kdtree {

// "GPU-2f1c6a52-...": the 16 bytes of a UUID as nvidia-smi prints them.
std::string format_gpu_uuid(std::span<const std::uint8_t, 16> bytes);

// NUMA node of the PCI device "0000:3B:00.0" (any case), from `devices`; -1 where the system does
// not say.
int numa_node_of_pci_device(std::string_view pci_bus_id,
                            const std::filesystem::path& devices = "/sys/bus/pci/devices");

}  // namespace kdtree
