// SPDX-License-Identifier: GPL-2.0
/*
 * Slots in a process' page tables. The inline functions of kernel headers write them, because the
 * core's own functions for it are not exported. Locks and counts are the core's.
 */

#include <linux/mm.h>
#include <asm/pgalloc.h>

#include "core/compat.h"
#include "core/pt_slot.h"
#include "core/pt_tree.h"

static p4d_t *pt_slot_make_p4d(struct mm_struct *mm, unsigned long addr)
{
	pgd_t *pgd = pgd_offset(mm, addr);
	pteval_t *table;

	if (pgtable_l5_enabled() && pgd_none(*pgd)) {
		table = pt_table_alloc(PG_LEVEL_512G);
		if (!table)
			return NULL;
		spin_lock(&mm->page_table_lock);
		if (pgd_none(*pgd)) {
			smp_wmb(); /* zeroed before it is walked */
			pgd_populate(mm, pgd, (p4d_t *)table);
			table = NULL;
		}
		spin_unlock(&mm->page_table_lock);
		if (table)
			pt_table_free(table, PG_LEVEL_512G);
	}
	return p4d_offset(pgd, addr);
}

static pud_t *pt_slot_make_pud(struct mm_struct *mm, unsigned long addr)
{
	p4d_t *p4d = pt_slot_make_p4d(mm, addr);
	pteval_t *table;

	if (!p4d)
		return NULL;
	if (p4d_none(*p4d)) {
		table = pt_table_alloc(PG_LEVEL_1G);
		if (!table)
			return NULL;
		spin_lock(&mm->page_table_lock);
		if (p4d_none(*p4d)) {
			mm_inc_nr_puds(mm);
			smp_wmb(); /* zeroed before it is walked */
			p4d_populate(mm, p4d, (pud_t *)table);
			table = NULL;
		}
		spin_unlock(&mm->page_table_lock);
		if (table)
			pt_table_free(table, PG_LEVEL_1G);
	}
	return pud_offset(p4d, addr);
}

static pmd_t *pt_slot_make_pmd(struct mm_struct *mm, unsigned long addr)
{
	pud_t *pud = pt_slot_make_pud(mm, addr);
	spinlock_t *lock;
	pteval_t *table;

	if (!pud)
		return NULL;
	if (pud_none(*pud)) {
		table = pt_table_alloc(PG_LEVEL_2M);
		if (!table)
			return NULL;
		lock = pud_lock(mm, pud);
		if (pud_none(*pud)) {
			mm_inc_nr_pmds(mm);
			smp_wmb(); /* zeroed before it is walked */
			pud_populate(mm, pud, (pmd_t *)table);
			table = NULL;
		}
		spin_unlock(lock);
		if (table)
			pt_table_free(table, PG_LEVEL_2M);
	}
	return pmd_offset(pud, addr);
}

pteval_t *pt_slot_own_table(struct mm_struct *mm, unsigned long addr)
{
	pmd_t *pmd = pt_slot_make_pmd(mm, addr);
	spinlock_t *lock;
	pteval_t *table;

	if (!pmd)
		return NULL;
	if (pmd_none(*pmd)) {
		table = pt_table_alloc(PG_LEVEL_4K);
		if (!table)
			return NULL;
		lock = pmd_lock(mm, pmd);
		if (pmd_none(*pmd)) {
			mm_inc_nr_ptes(mm);
			smp_wmb(); /* zeroed before it is walked */
			pmd_populate(mm, pmd, virt_to_page(table));
			table = NULL;
		}
		spin_unlock(lock);
		if (table)
			pt_table_free(table, PG_LEVEL_4K);
	}
	return (pteval_t *)pmd_page_vaddr(*pmd);
}

int pt_slot_prepare(struct mm_struct *mm, unsigned long addr, unsigned int level)
{
	switch (level) {
	case PG_LEVEL_4K:
		return pt_slot_make_pmd(mm, addr) ? 0 : -ENOMEM;
	case PG_LEVEL_2M:
		return pt_slot_make_pud(mm, addr) ? 0 : -ENOMEM;
	case PG_LEVEL_1G:
		return pt_slot_make_p4d(mm, addr) ? 0 : -ENOMEM;
	case PG_LEVEL_512G:
		return 0;
	}
	return -EINVAL;
}

int pt_slot_fill(struct mm_struct *mm, unsigned long addr, unsigned int level)
{
	if (level == PG_LEVEL_4K)
		return pt_slot_own_table(mm, addr) ? 0 : -ENOMEM;
	/* The table in this slot is the one above the slots of the next lower level. */
	return pt_slot_prepare(mm, addr, level - 1);
}

/* Returns the slot's entry; 0 where it is empty, or a table above is missing. */
pteval_t pt_slot_get(struct mm_struct *mm, unsigned long addr, unsigned int level)
{
	pgd_t *pgd = pgd_offset(mm, addr);
	p4d_t *p4d;
	pud_t *pud;

	if (level == PG_LEVEL_512G || (pgtable_l5_enabled() && pgd_none(*pgd)))
		return pgd_val(*pgd);
	p4d = p4d_offset(pgd, addr);
	if (level == PG_LEVEL_1G || p4d_none(*p4d))
		return p4d_val(*p4d);
	pud = pud_offset(p4d, addr);
	if (level == PG_LEVEL_2M || pud_none(*pud))
		return pud_val(*pud);
	return pmd_val(*pmd_offset(pud, addr));
}

/* Fills or empties the slot, and returns the old entry. The tables above are there. */
pteval_t pt_slot_set(struct mm_struct *mm, unsigned long addr, unsigned int level, pteval_t entry)
{
	pgd_t *pgd = pgd_offset(mm, addr);
	spinlock_t *lock;
	p4d_t *p4d;
	pud_t *pud;
	pmd_t *pmd;
	pteval_t old;

	if (level == PG_LEVEL_512G) {
		spin_lock(&mm->page_table_lock);
		old = pgd_val(*pgd);
		set_pgd(pgd, __pgd(entry));
		spin_unlock(&mm->page_table_lock);
		return old;
	}
	p4d = p4d_offset(pgd, addr);
	if (level == PG_LEVEL_1G) {
		spin_lock(&mm->page_table_lock);
		old = p4d_val(*p4d);
		set_p4d(p4d, __p4d(entry));
		spin_unlock(&mm->page_table_lock);
		return old;
	}
	pud = pud_offset(p4d, addr);
	if (level == PG_LEVEL_2M) {
		lock = pud_lock(mm, pud);
		old = pud_val(*pud);
		set_pud(pud, __pud(entry));
		spin_unlock(lock);
		return old;
	}
	pmd = pmd_offset(pud, addr);
	lock = pmd_lock(mm, pmd);
	old = pmd_val(*pmd);
	set_pmd(pmd, __pmd(entry));
	spin_unlock(lock);
	return old;
}

/* Whether the core's table has nothing but empty tables below it. Faults may add some. */
static bool pt_slot_table_is_empty(pteval_t *table, unsigned int level)
{
	unsigned int i;
	pteval_t entry;

	for (i = 0; i < PT_ENTRIES; i++) {
		entry = READ_ONCE(table[i]);
		if (!entry)
			continue;
		if (level == PG_LEVEL_4K || (entry & _PAGE_PSE) ||
		    !pt_slot_table_is_empty(pt_entry_table(entry), level - 1))
			return false;
	}
	return true;
}

/* Whether the tables that the core has put into the slot map nothing. */
bool pt_slot_is_empty(struct mm_struct *mm, unsigned long addr, unsigned int level)
{
	pteval_t entry = pt_slot_get(mm, addr, level);

	return !entry ||
	       (!(entry & _PAGE_PSE) && pt_slot_table_is_empty(pt_entry_table(entry), level));
}
