/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Flushes of the TLBs of all CPUs that may have translations of a process.
 *
 * The order is always: clear entries, flush, and only then reuse the frames or the tables.
 */
#ifndef VELLUM_PT_FLUSH_H
#define VELLUM_PT_FLUSH_H

#include <linux/mm_types.h>

int pt_flush_init(void);
bool pt_flush_is_direct(void);

/* Flushes translations of pages in the range. */
void pt_flush_range(struct mm_struct *mm, unsigned long start, unsigned long end);
/* Flushes the translation of the 2 MiB at the address, which one entry maps. */
void pt_flush_huge(struct mm_struct *mm, unsigned long start);
/* Flushes translations of all pages. */
void pt_flush_all(struct mm_struct *mm);
/* Flushes translations in the range, and what the CPUs cache of the tables above. */
void pt_flush_tables(struct mm_struct *mm, unsigned long start, unsigned long end);

#endif /* VELLUM_PT_FLUSH_H */
