// Finds and calls the TensorRT that this library was loaded beside. The library links to none: one file serves
// TensorRT 10, TensorRT 11 and TensorRT for RTX.
//
// TensorRT 11 changed the tables of virtual functions of two classes that a plugin library calls into, IPluginRegistry
// and ILogger. A call through the class of either version's headers would reach another function in the other version,
// so both are called by their place in the table, which is chosen by the version of the TensorRT found at run time.
#pragma once

#include "NvInferRuntime.h"

namespace replayssm {

// Register a creator with the plugin registry of every TensorRT that is loaded now: usually one, or none. Registries
// of a version unknown to this library are left alone, with a warning.
void register_with_loaded_tensorrt(nvinfer1::IPluginCreatorInterface& creator, const char* plugin_namespace);

// Is a TensorRT library among the callers, as when IPluginRegistry::loadLibrary is opening this library?
bool is_called_by_tensorrt();

// Pass a message to the logger of `finder`, or of the loaded TensorRT where there is no finder. False when there is no
// logger, or one of an unknown version.
bool log_through_tensorrt(nvinfer1::ILoggerFinder* finder, nvinfer1::ILogger::Severity severity, const char* message);

}  // namespace replayssm
