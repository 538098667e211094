//! Symbols for libraries, which are modules that are no context's (since CUDA 12.0), and for attributes of functions.

use std::ffi::{c_int, c_uint};

use super::pointer::{CodeImage, Out, TextPointer};
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_HANDLE, INVALID_VALUE};
use crate::trace::complain;

/// `CU_FUNC_ATTRIBUTE_MAX` of CUDA 13.
const MAX: c_int = 16;

symbols! {
    call cuLibraryLoadData(
        library: Out<usize>, code: CodeImage,
        _options: usize, _values: usize, _count: c_uint,
        _library_options: usize, _library_values: usize, _library_count: c_uint,
    ) |driver| {
        code.present()?;
        library.present()?;
        let module = driver.load(code.ptx()?).map_err(|(code, log)| {
            complain(&log);
            code
        })?;
        let handle = driver.new_handle();
        driver.work.libraries.insert(handle, module);
        library.put(handle)
    };

    call cuLibraryUnload(library: usize) |driver| {
        let module = driver.work.libraries.remove(&library).ok_or(INVALID_HANDLE)?;
        driver.work.modules.remove(&module);
        Ok(())
    };

    call cuLibraryGetModule(module: Out<usize>, library: usize) |driver| {
        let of = *driver.work.libraries.get(&library).ok_or(INVALID_HANDLE)?;
        module.put(of)
    };

    // A kernel is a function here. Programs may launch it by either handle.
    call cuLibraryGetKernel(kernel: Out<usize>, library: usize, name: TextPointer) |driver| {
        kernel.present()?;
        let module = *driver.work.libraries.get(&library).ok_or(INVALID_HANDLE)?;
        kernel.put(driver.create_function(module, name.get()?)?)
    };

    call cuKernelGetFunction(function: Out<usize>, kernel: usize) |driver| {
        driver.current()?;
        driver.function(kernel)?;
        function.put(kernel)
    };

    call cuKernelGetAttribute(value: Out<c_int>, attribute: c_int, kernel: usize, device: c_int) |driver| {
        driver.device(device)?;
        driver.function(kernel)?;
        value.put(attribute_of(attribute)?)
    };

    call cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, function: usize) |driver| {
        driver.function(function)?;
        value.put(attribute_of(attribute)?)
    };
}

/// Return an attribute (`CUfunction_attribute` in cuda.h). The ones that follow from the code are 0.
fn attribute_of(attribute: c_int) -> Result<c_int, CuCode> {
    match attribute {
        // MAX_THREADS_PER_BLOCK
        0 => Ok(1024),
        other if (1..MAX).contains(&other) => Ok(0),
        _ => Err(INVALID_VALUE),
    }
}
