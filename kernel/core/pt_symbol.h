/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The few functions of the kernel that are not exported and that the module calls where they are
 * found. A kprobe finds them; a static call must reach them: a direct call, as an indirect one would
 * be a fault where the processor checks targets of branches (the function's landing pad is removed
 * at boot, because nothing takes its address).
 */
#ifndef VELLUM_PT_SYMBOL_H
#define VELLUM_PT_SYMBOL_H

/* The address of a function, or NULL. */
void *pt_symbol_find(const char *name);

#endif /* VELLUM_PT_SYMBOL_H */
