#include "comm/mpi/mpi_process_group.h"

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "comm/mpi/mpi_call.h"

namespace kdtree {

namespace {

class MpiProcessGroup final : public ProcessGroup {
 public:
  MpiProcessGroup() {
    // Errors come back as codes and become exceptions, so that the message can say what was being
    // done.
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
              "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world_size_), "MPI_Comm_size");
    MPI_Comm local = MPI_COMM_NULL;
    check_mpi(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &local),
        "MPI_Comm_split_type");
    check_mpi(MPI_Comm_rank(local, &local_rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(local, &local_size_), "MPI_Comm_size");
    check_mpi(MPI_Comm_free(&local), "MPI_Comm_free");
  }
  MpiProcessGroup(const MpiProcessGroup&) = delete;
  MpiProcessGroup& operator=(const MpiProcessGroup&) = delete;
  ~MpiProcessGroup() override { MPI_Finalize(); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }
  std::string host_name() const override {
    std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
    int length = 0;
    check_mpi(MPI_Get_processor_name(name.data(), &length), "MPI_Get_processor_name");
    return name.data();
  }
  void barrier() override { check_mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier"); }
  void broadcast(void* data, std::int64_t bytes, int root) override {
    check_mpi(MPI_Bcast(data, mpi_count(bytes), MPI_BYTE, root, MPI_COMM_WORLD), "MPI_Bcast");
  }
  void all_gather(const void* sent, std::int64_t bytes, void* received) override {
    check_mpi(MPI_Allgather(sent, mpi_count(bytes), MPI_BYTE, received, mpi_count(bytes), MPI_BYTE,
                            MPI_COMM_WORLD),
              "MPI_Allgather");
  }
  [[noreturn]] void abort(int exit_code) override {
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }

 private:
  int rank_ = 0;
  int world_size_ = 1;
  int local_rank_ = 0;
  int local_size_ = 1;
};

// Value of an environment variable as a count, or 0.
int environment_count(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? 0 : std::atoi(value);
}

// Tasks that the launcher says it started, with the variable that says so; {0, ""} without a
// launcher. The innermost launcher wins: mpirun -n 1 inside an allocation of many tasks is one
// rank, and meant so.
struct LaunchedTasks {
  int count = 0;
  const char* variable = "";
};
LaunchedTasks launched_tasks() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS",
                               "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}) {
    if (const int count = environment_count(variable); count > 0) {
      return {count, variable};
    }
  }
  return {};
}

}  // namespace

bool launched_as_mpi_job() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(variable) != nullptr) {
      return true;
    }
  }
  return environment_count("SLURM_STEP_NUM_TASKS") > 1;
}

void require_no_lost_ranks() {
  const LaunchedTasks tasks = launched_tasks();
  require_input(tasks.count <= 1,
                "{}={} says that {} tasks were started, but MPI sees a world of 1: the launcher "
                "and this program's MPI do "
                "not talk to each other. Start with `srun --mpi=pmix ...` (`srun --mpi=list` shows "
                "what there is) or with "
                "the mpirun of the MPI that `kdtree --version` names; for one deliberate rank give "
                "--communicator self",
                tasks.variable, tasks.count, tasks.count);
}

std::unique_ptr<ProcessGroup> make_mpi_process_group(int* argc, char*** argv, bool single) {
  int initialised = 0;
  check_mpi(MPI_Initialized(&initialised), "MPI_Initialized");
  check(initialised == 0, "MPI is initialised already: one process group a process");
  int provided = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  auto group = std::make_unique<MpiProcessGroup>();
  if (group->world_size() == 1 && !single) {
    require_no_lost_ranks();
  }
  return group;
}

}  // namespace kdtree
