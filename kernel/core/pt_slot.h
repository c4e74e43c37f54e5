/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Slots: entries in a process' own page tables that can hold a table of the module.
 *
 * The slot of level n at an address is the entry that points to the table of level n there: for
 * level 1 an entry of a PMD table, and so on. The tables above belong to the process. Missing
 * tables are made and counted as the core does it, and the core frees them with the mapping.
 *
 * Callers hold the mmap lock, or are called where the core is about to walk these tables itself (a
 * notifier). The tables above a slot stay for as long as a mapping covers the slot.
 */
#ifndef VELLUM_PT_SLOT_H
#define VELLUM_PT_SLOT_H

#include <linux/mm.h>
#include <linux/types.h>

/* Makes the tables above the slot. */
int pt_slot_prepare(struct mm_struct *mm, unsigned long addr, unsigned int level);
pteval_t pt_slot_get(struct mm_struct *mm, unsigned long addr, unsigned int level);
pteval_t pt_slot_set(struct mm_struct *mm, unsigned long addr, unsigned int level, pteval_t entry);
bool pt_slot_is_empty(struct mm_struct *mm, unsigned long addr, unsigned int level);

/* Puts an empty table of the process' own into a slot that has none. */
int pt_slot_fill(struct mm_struct *mm, unsigned long addr, unsigned int level);

/* Returns the process' own table of level 1 at the address, and makes it where there is none. */
pteval_t *pt_slot_own_table(struct mm_struct *mm, unsigned long addr);

/*
 * The highest level that a slot can have: the table of the level above is the process' top table.
 */
static inline unsigned int pt_slot_highest(void)
{
	return pgtable_l5_enabled() ? PG_LEVEL_512G : PG_LEVEL_1G;
}

/* Bytes that a table of this level covers. */
static inline unsigned long pt_slot_size(unsigned int level)
{
	return PAGE_SIZE << (9 * level);
}

#endif /* VELLUM_PT_SLOT_H */
