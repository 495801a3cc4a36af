# What an installation holds:
#
#   bin/hypermla            the command line, one file that needs no library
#   lib/libhypermla.so      include/hypermla/, C++ and C, and find_package(hypermla)
#   share/hypermla/         conf, the knowledge cards, the sources of kernels, which are compiled at run time, and
#                           licenses; program and library find it relative to themselves, so it can be moved
#
# Components: runtime (bin and share) and development (lib and include).
include(CMakePackageConfigHelpers)
# Everybody may look into the directories of an installation, whatever the umask of who makes it.
set(CMAKE_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
                                                WORLD_READ WORLD_EXECUTE)

# `./hypermla` builds the command line only. What is missing is said before anything is copied, so no half of an
# installation is left behind.
function(require_built target component)
  install(CODE "if(NOT EXISTS \"$<TARGET_FILE:${target}>\")
  message(FATAL_ERROR \"$<TARGET_FILE_NAME:${target}> is not built; run `cmake --build ${PROJECT_BINARY_DIR}` first\")
endif()" COMPONENT ${component})
endfunction()
require_built(hypermla_cli runtime)
require_built(hypermla development)

set(HYPERMLA_DATA_DIR share/hypermla)  # where program and library look for it
install(TARGETS hypermla_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
install(DIRECTORY kernels DESTINATION ${HYPERMLA_DATA_DIR} COMPONENT runtime
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh")
if(HYPERMLA_KERNELS)  # under names of their own, so they lie beside the others
  install(DIRECTORY ${HYPERMLA_KERNELS}/ DESTINATION ${HYPERMLA_DATA_DIR}/kernels COMPONENT runtime
          FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh")
endif()
install(DIRECTORY conf DESTINATION ${HYPERMLA_DATA_DIR} COMPONENT runtime)
install(FILES LICENSE DESTINATION ${HYPERMLA_DATA_DIR} COMPONENT runtime)
# Of what is compiled in: their licenses ask for a copy. Debian has it beside each package; who brings the libraries
# from elsewhere adds it.
foreach(package libfmt-dev nlohmann-json3-dev libcli11-dev)
  set(notice /usr/share/doc/${package}/copyright)
  if(EXISTS ${notice})
    install(FILES ${notice} DESTINATION ${HYPERMLA_DATA_DIR}/licenses RENAME ${package} COMPONENT runtime)
  endif()
endforeach()
# What engines' calls run on GPUs, compiled: a machine without compilers runs it, and nobody waits for a compiler.
set(compile_for "")
if(SKBUILD AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/installed.txt)  # ./hypermla has installed the compilers
  set(compile_for sm_90)
endif()
set(HYPERMLA_COMPILE_FOR "${compile_for}" CACHE STRING
    "GPUs, such as sm_90, for which an installation brings what engines call compiled; needs requirements.txt")
if(HYPERMLA_COMPILE_FOR)
  set(compiled ${PROJECT_BINARY_DIR}/compiled)
  file(GLOB_RECURSE compiled_from CONFIGURE_DEPENDS kernels/*.h kernels/*.cuh)
  add_custom_command(
    OUTPUT ${compiled}/done
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${compiled}
    COMMAND ${CMAKE_COMMAND} -E env HYPERMLA_CACHE_DIR=${compiled} HYPERMLA_ROOT=${PROJECT_SOURCE_DIR}
            $<TARGET_FILE:hypermla_cli> compile all --decode --arch=${HYPERMLA_COMPILE_FOR}
    COMMAND ${CMAKE_COMMAND} -E touch ${compiled}/done
    DEPENDS hypermla_cli ${compiled_from} VERBATIM)
  add_custom_target(hypermla_compiled ALL DEPENDS ${compiled}/done)
  install(DIRECTORY ${compiled}/kernels/ DESTINATION ${HYPERMLA_DATA_DIR}/compiled COMPONENT runtime)
endif()
install(DIRECTORY docs/knowledge DESTINATION ${HYPERMLA_DATA_DIR}/docs COMPONENT runtime)
install(FILES include/hypermla/dtype.h include/hypermla/kernel_file.h include/hypermla/tensor_map.h
        DESTINATION ${HYPERMLA_DATA_DIR}/include/hypermla COMPONENT runtime)

install(TARGETS hypermla EXPORT hypermla LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(DIRECTORY include/hypermla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hypermla)
install(EXPORT hypermla NAMESPACE hypermla:: FILE hypermla-config.cmake DESTINATION ${package_dir}
        COMPONENT development)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/hypermla-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/hypermla-config-version.cmake DESTINATION ${package_dir} COMPONENT development)
