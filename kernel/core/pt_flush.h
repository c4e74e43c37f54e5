/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Flushing of TLBs, of all processors that may have translations of a process.
 *
 * The order is always: clear entries, flush, and only then let anybody have the frames or the
 * tables.
 */
#ifndef VELLUM_PT_FLUSH_H
#define VELLUM_PT_FLUSH_H

#include <linux/mm_types.h>

int pt_flush_init(void);
bool pt_flush_is_direct(void);

/* Translations of pages in the range. */
void pt_flush_range(struct mm_struct *mm, unsigned long start, unsigned long end);
/* The translation of the 2 MiB at the address, by one entry. */
void pt_flush_huge(struct mm_struct *mm, unsigned long start);
/* Translations of all pages. */
void pt_flush_all(struct mm_struct *mm);
/* Translations in the range, and what the processors keep of the tables above. */
void pt_flush_tables(struct mm_struct *mm, unsigned long start, unsigned long end);

#endif /* VELLUM_PT_FLUSH_H */
